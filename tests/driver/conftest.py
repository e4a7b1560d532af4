from tests.driver.quiet import own_base, quiet

__all__ = ["own_base", "quiet"]

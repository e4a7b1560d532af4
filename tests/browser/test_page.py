"""The page of `nbelastic dashboard` in a browser: a view without a notebook."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_view import faults
from playwright.sync_api import expect

from tests.driver.hostless_cluster import clusters_folder, start_hostless

__all__ = ["clusters_folder", "start_hostless"]
pytestmark = pytest.mark.browser


@pytest.fixture
def address(start_hostless):
    """The address that the command prints for a cluster without hosts."""
    start_hostless("paged")
    command = [sys.executable, "-m", "nbelastic", "dashboard"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process.stdout.readline().rstrip("\n")
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.soak(share=0.2)
def test_two_pages_show_and_change_a_cluster(context, address):
    """A request of one page changes both; files can be saved; the end of the cluster ends the command. axe finds no fault, and no
    error is logged."""
    complaints = []
    pages = [context.new_page() for _ in range(2)]
    for page in pages:
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(address)
        expect(page.locator(".nbe-phase")).to_have_text("waiting")
        expect(page).to_have_title("paged · nbelastic")
    first, second = pages
    assert faults(first) == []
    first.get_by_label("max", exact=True).fill("3")
    first.get_by_role("button", name="Apply").click()
    expect(second.locator(".nbe-facts").first).to_contain_text("0 (1–3)")
    with first.expect_download() as download:
        first.get_by_role("button", name="Save trace").click()
    assert download.value.suggested_filename == "nbelastic-trace.json"
    first.reload()
    expect(first.locator(".nbe-facts").first).to_contain_text("0 (1–3)")
    stranger = context.new_page()
    stranger.goto(address.partition("#")[0])
    expect(stranger.get_by_role("alert")).to_contain_text("no valid token")
    stranger.close()
    second.get_by_role("button", name="Stop cluster").click()
    second.wait_for_timeout(500)  # an earlier second click is a double click, and confirms nothing
    second.get_by_role("button", name="Really stop it?").click()
    for page in pages:
        page.bring_to_front()
        expect(page.locator(".nbe-phase")).to_have_text("finished")
        expect(page.locator(".nbe-warning")).to_be_hidden()
    assert [text for text in complaints if "WebSocket" not in text] == []

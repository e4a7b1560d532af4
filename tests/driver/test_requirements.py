"""Requirements as users write them become lines that every host can use, or one line says why not."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.client.configuration import configure_again
from nbelastic.client.requirements import LARGEST, read_requirements

GOOD = [
    "einops",
    "timm>=1.0,<2 ; python_version > '3.10'",
    "requests[socks]==2.32.0 --hash=sha256:00",
    "pkg @ https://host/pkg-1.0-py3-none-any.whl#sha256=00",
    "git+ssh://git@host/group/pkg.git@v1",
    "--index-url https://me:word@host/simple",
    "--find-links /shared/wheels",
    "--find-links ${WHEELS}/here",
    "pkg @ file:///shared/pkg-1.0-py3-none-any.whl",
    "/shared/pkg-1.0-py3-none-any.whl",
    "--pre",
]


@pytest.mark.parametrize("line", GOOD)
def test_lines_that_a_host_can_use_stay_as_they_are(line):
    assert read_requirements([line]) == (line,)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-e .", "-e"),
        ("--editable=git+https://me:word@host/x.git", "-e"),
        ("-c limits.txt", "-c"),
        ("--constraint limits.txt", "-c"),
        ("-climits.txt", "-c"),
        ("--find-links wheels", "wheels is a path"),
        ("-fwheels", "wheels is a path"),
        ("-r https://me:word@host/more.txt", "not a URL"),
        (".", ". is a path of this machine"),
        ("./pkg", "./pkg is a path of this machine"),
        ("../lib/pkg[extra]", "../lib/pkg[extra] is a path of this machine"),
        ("~/pkg", "~/pkg is a path of this machine"),
        ("wheels/pkg-1.0-py3-none-any.whl", "wheels/pkg-1.0-py3-none-any.whl is a path"),
        ("pkg-1.0-py3-none-any.whl", "pkg-1.0-py3-none-any.whl is a path"),
        ("pkg @ file:wheels/pkg-1.0-py3-none-any.whl", "wheels/pkg-1.0-py3-none-any.whl is a path"),
        ("--find-links=./wheels", "./wheels is a path"),
        ("-f wheels/", "wheels/ is a path"),
    ],
)
def test_what_only_this_machine_has_is_refused_in_one_line(tmp_path, line, words):
    """The text has the file and the number of the line, and no password."""
    file = tmp_path / "requirements.txt"
    file.write_text(f"# for training\neinops\n{line}\n")
    with pytest.raises(nbe.UsageError) as error:
        nbe.Cluster(requirements=file)
    text = str(error.value)
    assert text.startswith(f"{file}:3: ")
    assert words in text
    assert "word" not in text.replace(words, "")
    assert "\n" not in text


def test_comments_continuations_and_empty_lines_do_not_count(tmp_path):
    """Files that differ in them make the same environment."""
    file = tmp_path / "requirements.txt"
    file.write_text("\ufeff# all\n\neinops \\\n  >=0.8   # new\n  timm#not-a-comment\n\\\n")
    assert read_requirements(str(file)) == ("einops >=0.8", "timm#not-a-comment")


def test_files_that_a_file_names_are_put_in_its_place(tmp_path):
    """Paths are relative to the file that names them; a circle is refused."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "all.txt").write_text("a\n-r parts/one.txt\nd\n")
    (tmp_path / "parts" / "one.txt").write_text("b\n--requirement=two.txt\n")
    (tmp_path / "parts" / "two.txt").write_text("c\n")
    assert read_requirements(tmp_path / "all.txt") == ("a", "b", "c", "d")
    (tmp_path / "parts" / "two.txt").write_text("-r../all.txt\n")
    with pytest.raises(nbe.UsageError, match=r"two\.txt:1: .*all\.txt leads back to itself"):
        read_requirements(tmp_path / "all.txt")


@pytest.mark.parametrize("given", [3, [1], b"einops", {"einops": "1"}])
def test_other_things_than_a_path_or_lines_are_refused(given):
    with pytest.raises(nbe.UsageError, match="requirements must be the path of a file, or a list of lines"):
        nbe.Cluster(requirements=given)


def test_a_file_that_cannot_be_read_or_is_too_large_is_named(tmp_path):
    missing, binary, large = tmp_path / "missing.txt", tmp_path / "binary.txt", tmp_path / "large.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    large.write_text("a\n" * LARGEST + "b\n")
    with pytest.raises(nbe.UsageError, match=r"missing\.txt cannot be read: No such file"):
        nbe.Cluster(requirements=missing)
    with pytest.raises(nbe.UsageError, match=r"binary\.txt cannot be read: it is not UTF-8"):
        nbe.Cluster(requirements=binary)
    with pytest.raises(nbe.UsageError, match="characters are too many"):
        nbe.Cluster(requirements=large)


def test_a_later_driver_does_not_read_the_file_again(tmp_path):
    """A cluster keeps its requirements, also if the file has been edited or removed since."""
    file = tmp_path / "requirements.txt"
    file.write_text("einops==0.8.2\n")
    arguments = nbe.Cluster(requirements=file)._link.configuration.arguments
    file.unlink()
    again = configure_again("one", str(tmp_path), arguments)
    assert again.settings.requirements == ("einops==0.8.2",)
    assert again.arguments["requirements"] == ["einops==0.8.2"]

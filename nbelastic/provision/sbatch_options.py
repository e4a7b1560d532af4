"""Options of Slurm's `sbatch` as options of the launcher: `gres=gpu:4` becomes `--gres=gpu:4` in the batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from nbelastic.errors import UsageError

# Those that say what a job of one node may use, and when. The others would change how the agent starts.
SBATCH = (
    *("partition", "time", "gres", "gpus", "gpus-per-node", "mem", "mem-per-cpu", "mem-per-gpu", "cpus-per-task"),
    *("cpus-per-gpu", "constraint", "nodelist", "exclude", "reservation", "licenses", "nice", "begin", "tmp", "wckey"),
)
SIGNAL_SPREAD = 120.0  # seconds: a minute by which Slurm's signal may be early, and one in which the agent starts
_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(?P<third>\d+))?")
_TIME, _ARRAY = re.compile(r"--time(=|$)|-t"), re.compile(r"--array(=|$)|-a")
_CLUSTERS = re.compile(r"--clusters?(=|$)|-M")
_GRES = re.compile(r"(?<![\w-])gpu(?::[^:,\s]+?)??(?::(\d+))?(?=[,\s(]|$)")  # gpu, gpu:4, gpu:a100:4
_GPUS = re.compile(r"(?:[^:,\s]+:)?(\d+)")  # 4, a100:4


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Divide the user's options into those of the launcher itself and words for `sbatch`.

    UsageError for a broken line, or an option that cannot work.
    """
    _refuse_words(str(options.get("options", "")))
    own, words = {}, []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if flag in SBATCH:
            if "\n" in str(value):
                raise UsageError(f"slurm: {name}={value!r}: one line.")
            words.append(shlex.quote(f"--{flag}={value}"))
        else:
            own[name] = value
    return own, words


def _refuse_words(text: str) -> None:
    """UsageError for options of `sbatch` that may not be in this text."""
    for word in _words(text):
        if _TIME.match(word):
            raise UsageError(
                f"slurm: options has {word}: write it as the launcher option time=, which nbelastic checks."
            )
        if _ARRAY.match(word):
            raise UsageError(f"slurm: options has {word}: a host is one job. Raise --max for more jobs.")
        if _CLUSTERS.match(word):  # scontrol and scancel would take the number for that of a job here
            raise UsageError(
                f"slurm: options has {word}: set SLURM_CLUSTERS where Jupyter starts, which all of Slurm's commands read."
            )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # the batch system will say what is wrong
        return []


def check_time_limit(options: Mapping[str, Any], successor: float) -> None:
    """UsageError if a job that asks for this time limit would have to be replaced as soon as it starts."""
    name = next((name for name in ("time", "timelimit") if name in options), "")
    if advice := too_short(str(options.get(name, "")), successor):
        raise UsageError(f"{name}={options[name]}: {advice}")


def too_short(text: str, successor: float) -> str:
    """Explain why this time limit, in Slurm's format, is too short, and what to do.

    Empty if it is long enough, endless or not known.
    """
    match = _LIMIT.fullmatch(text)
    if not match:
        return ""
    days, *parts = (int(part or 0) for part in match.groups())
    if match["days"] is None and match["third"] is None:  # minutes, or minutes:seconds
        parts = [0, *parts[:2]]
    limit = days * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if not limit or limit >= successor + SIGNAL_SPREAD:
        return ""
    return (
        f"a job's successor is submitted {successor:g} s before the time limit. Choose a limit of "
        f"at least {successor + SIGNAL_SPREAD:g} s, or a lower successor in timeouts."
    )


def gpus_of(options: Mapping[str, Any]) -> int:
    """How many GPUs a job with these options of the launcher asks for; 0: none, or it is not known."""
    asked = {name.replace("_", "-"): str(value) for name, value in options.items()}
    words = _words(asked.get("options", ""))
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, given, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            asked.setdefault(name, value if given else following)
        elif word.startswith("-G"):  # --gpus
            asked.setdefault("gpus", word[2:] or following)
    for name in ("gpus-per-node", "gpus"):
        if name in asked:
            return sum(int(number) for number in _GPUS.findall(asked[name]))
    return sum(int(number or 1) for number in _GRES.findall(asked.get("gres", "")))

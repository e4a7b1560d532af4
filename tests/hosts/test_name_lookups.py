"""torch's stores look up no names in workers, whatever DNS does; the user's code still can."""

import subprocess
import sys

import pytest

from tests.hosts.namespaces import ENVIRONMENT, missing

# The name server of a namespace of its own: it counts the queries, and does not answer.
PREPARE = 'ip link set lo up && mount --bind "$0" /etc/resolv.conf && exec "$@"'
CODE = """
import os, socket, sys
from nbelastic.worker.name_lookups import end_name_lookups
from nbelastic.worker.process_group import Offer
from torch.distributed import TCPStore

server, queries = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
server.bind(("127.0.0.1", 53))
if sys.argv[1] == "ended":
    end_name_lookups()
offer = Offer("127.0.0.1")
if os.fork() == 0:  # as a worker from its template
    host, _, port = offer.endpoint.rpartition(":")
    TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    os._exit(0)
os.wait()
if sys.argv[1] == "ended":
    try:
        socket.gethostbyname("data.example")
    except OSError:
        pass
server.setblocking(False)
try:
    while True:
        queries.append(server.recv(1000))
except BlockingIOError:
    print("own" if any(b"example" in query for query in queries) else "", sum(b"in-addr" in query for query in queries))
"""


@pytest.mark.soak(share=0.2)
@pytest.mark.parametrize(("part", "printed"), [("ended", "own 0"), ("usual", "1")])
def test_stores_look_up_no_names(tmp_path, part, printed):
    """Neither a process nor its forks ask DNS for the names of peers after `end_name_lookups`; torch alone does."""
    if reason := missing():
        pytest.skip(reason)
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    words = ["unshare", "--net", "--mount", "sh", "-c", PREPARE, str(file), sys.executable, "-c", CODE, part]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == printed, done.stderr

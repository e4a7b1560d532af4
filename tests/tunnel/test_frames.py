"""The frames of a tunnel."""

import random

import pytest

from nbelastic.tunnel.frames import HEAD, MAX_NOISE, MAX_PAYLOAD, PREAMBLE, Decoder, Frame, Kind, TunnelError, encode

FRAMES = [
    Frame(Kind.PING),
    Frame(Kind.DATA, 7, b"x" * MAX_PAYLOAD),
    Frame(Kind.CLOSE, 1 << 31),
    Frame(Kind.OUTPUT, 0, PREAMBLE),
]


def pieces_of(data, rng):
    while data:
        size = rng.randint(1, 5000)
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("seed", range(5))
def test_frames_arrive_whole_however_the_stream_is_cut(seed):
    """Frames arrive in order, whatever pieces the stream comes in, and after anything that a login shell prints."""
    noise = b"Welcome to gpu1!\x00\n"
    stream = noise + PREAMBLE + b"".join(map(encode, FRAMES))
    decoder = Decoder()
    found = [frame for piece in pieces_of(stream, random.Random(seed)) for frame in decoder.feed(piece)]
    assert found == FRAMES
    assert decoder.noise == noise


@pytest.mark.parametrize("head", [(0, 0, 0), (99, 0, 0), (int(Kind.DATA), 1, MAX_PAYLOAD + 1)])
def test_anything_else_is_an_error(head):
    """An unknown kind, or a frame that is too long, is an error before its payload is waited for."""
    with pytest.raises(TunnelError):
        list(Decoder(begun=True).feed(HEAD.pack(*head)))


def test_a_login_shell_may_not_print_without_end():
    """A host whose shell prints without end is an error, and takes no memory without end."""
    decoder = Decoder()
    assert list(decoder.feed(b"y\n" * (MAX_NOISE // 2))) == []
    with pytest.raises(TunnelError, match="prints without end"):
        list(decoder.feed(b"y\n"))

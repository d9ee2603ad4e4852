"""A model served over the loopback device, as its clients see it."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image
from torch import Tensor, nn

import equilibria as eq
from equilibria.cli.serve import hosts
from equilibria.data import load_digits
from equilibria.serving import Answerer, Limits, prediction_app
from equilibria.serving.answers import Answer
from equilibria.serving.server import LOOPBACK
from tests.program import invoke
from tests.serving.running import png, running

CLIENTS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    made = invoke(
        *("train", "digits-opteq", "training.epochs=3", "model.options.channels=8"),
        *("data.options.test_samples=12", "--output", folder),
    )
    assert made.exit_code == 0, made.output
    return eq.load(folder)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """As a file keeps them."""
    return (load_digits().test.images[:40] * 255).round() / 255


@pytest.fixture(scope="module")
def address(model: nn.Module) -> Iterator[str]:
    limits = Limits(megabytes=0.2, seconds=60)
    with running(prediction_app(Answerer(model), "digits", limits)) as place:
        yield place


def ask(address: str, content: bytes, **options: object) -> requests.Response:
    return requests.post(f"{address}/predict", data=content, timeout=60, **options)  # type: ignore[arg-type]


def test_an_answer_is_that_of_predict_and_certify(
    model: nn.Module, digits: Tensor, address: str
) -> None:
    said = ask(address, png(digits[0])).json()
    (known,) = eq.predict(model, digits[:1], top=5)
    assert said["label"] == known.label
    assert said["confidence"] == pytest.approx(known.confidence, abs=1e-5)
    assert list(said["top"]) == list(known.top)
    found = eq.certify(model, digits[:1], refine=False)
    assert said["certified"] == bool(found.certified_class[0])
    assert said["radius"] == pytest.approx(float(found.radius[0]), rel=1e-6)
    assert said["error"] == pytest.approx(float(found.error[0]), rel=1e-3)
    assert said["margin"] > said["margin_error"] > 0


def test_no_answer_is_lost_or_mixed_up(model: nn.Module, digits: Tensor, address: str) -> None:
    """64 clients at once, each with its own pictures, some of which are no pictures."""
    known = [one.label for one in eq.predict(model, digits)]
    assert len(set(known)) > 3
    bodies = [png(digit) for digit in digits]

    def client(number: int) -> list[tuple[int, int, dict[str, object]]]:
        got = []
        for turn in range(3):
            place = (number * 7 + turn * 13) % len(bodies)
            if (number + turn) % 8 == 0:
                answer = ask(address, bodies[place][:30] + bytes(turn))
                got.append((-1, answer.status_code, answer.json()))
            else:
                answer = ask(address, bodies[place])
                got.append((place, answer.status_code, answer.json()))
        return got

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [one for got in pool.map(client, range(CLIENTS)) for one in got]
    assert len(answers) == 3 * CLIENTS
    for place, status, said in answers:
        if place < 0:
            assert status == 400
            assert "cannot be read as an image" in str(said["error"])
        else:
            assert status == 200
            assert said["label"] == known[place]
    numbers = requests.get(f"{address}/metrics", timeout=60).text
    assert 'equilibria_requests_total{path="/predict",status="200"}' in numbers
    assert 'equilibria_request_seconds_bucket{le="+Inf"}' in numbers


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"", 400, "empty"),
        (b"hello", 400, "cannot be read as an image"),
        (bytes(300_000), 413, "send a smaller picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400, "cannot be read"),
    ],
    ids=["empty", "text", "too large", "eps"],
)
def test_what_is_no_picture_is_told(address: str, content: bytes, status: int, says: str) -> None:
    answer = ask(address, content)
    assert answer.status_code == status
    assert says in answer.json()["error"]
    assert requests.get(f"{address}/health", timeout=60).json()["status"] == "ok"


def test_a_form_with_one_file_is_a_picture(address: str, digits: Tensor) -> None:
    content = png(digits[0])
    known = ask(address, content).json()
    form = {"file": ("digit.png", content, "image/png")}
    for options in ({"files": form}, {"files": form, "data": {"note": "a zero"}}):
        answer = requests.post(f"{address}/predict", timeout=60, **options)  # type: ignore[arg-type]
        assert answer.status_code == 200
        assert answer.json() == known


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n'
NOTE = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nhello\r\n'


@pytest.mark.parametrize(
    ("content", "headers", "status", "says"),
    [
        (FILE + b"x\r\n" + FILE + b"y\r\n--b--\r\n", FORM, 400, "the form has 2 files"),
        (NOTE + b"--b--\r\n", FORM, 400, "the form has no file"),
        (b"--b--\r\n", FORM, 400, "the form has no file"),
        (FILE + b"\r\n--b--\r\n", FORM, 400, "the file in the form is empty"),
        (FILE + b"x", FORM, 400, "the form is incomplete"),
        (b"hello", FORM, 400, "the form is incomplete"),
        (b"--b\r\nhello\r\n--b--", FORM, 400, "the form is malformed"),
        (NOTE * 33 + b"--b--", FORM, 400, "more than 32 fields"),
        (FILE, {"Content-Type": "multipart/form-data"}, 400, "no boundary"),
        (FILE + b"hello\r\n--b--\r\n", FORM, 400, "cannot be read as an image"),
        (FILE + bytes(300_000) + b"\r\n--b--\r\n", FORM, 413, "send a smaller picture"),
    ],
    ids=[
        *("two files", "text only", "no field", "empty file", "cut off", "no form", "no headers"),
        *("many fields", "no boundary", "no picture", "too large"),
    ],
)
def test_a_form_without_just_one_picture_is_refused(
    address: str, content: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    answer = ask(address, content, headers=headers)
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_an_answer_takes_one_solve(digits: Tensor) -> None:
    """It was two, one for the prediction and one for the certificate."""
    model = eq.load("digits-opteq")
    answerer = Answerer(model)
    with eq.solving(model, record=True) as record:
        (answer,) = answerer([digits[0]])
    assert len(record.solutions) == 1
    assert answer.certified
    assert answer.iterations == int(record.solutions[0].iterations[0])


class Counting(Answerer):
    """Counts the solves of each batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.solves: list[int] = []

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        with eq.solving(self.model, record=True) as record:
            answers = super().__call__(images)
        self.solves.append(len(record.solutions))
        return answers


@pytest.mark.parametrize(("name", "layers"), [("digits-opteq", 1), ("cifar10-certified", 2)])
def test_a_request_takes_one_solve_per_layer(name: str, layers: int, digits: Tensor) -> None:
    counting = Counting(eq.load(name))
    with running(prediction_app(counting, name)) as place:
        assert ask(place, png(digits[0])).status_code == 200
    assert counting.solves == [layers]


def test_an_unrolled_model_is_answered_by_its_last_iterate(digits: Tensor) -> None:
    """Its certificate is of the equilibrium, which is another state."""
    model = eq.create_model("opteq-small", in_channels=1)
    known = eq.load("digits-opteq")
    model.images = known.images
    with eq.solving(model, gradient="unrolled"):
        (answer,) = Answerer(model)([digits[0]])
        (said,) = eq.predict(model, digits[:1])
    assert (answer.iterations, answer.confidence) == (said.iterations, said.confidence)


@pytest.mark.parametrize("side", [6_000, 15_000])
def test_a_picture_that_would_fill_the_memory_is_not_decoded(address: str, side: int) -> None:
    content = io.BytesIO()
    Image.new("1", (side, side)).save(content, "PNG")
    assert len(content.getvalue()) < 200_000
    answer = ask(address, content.getvalue())
    assert answer.status_code == 400
    assert "more than 25,000,000 pixels" in answer.json()["error"]


def test_a_body_without_a_length_is_cut_off(address: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(10_000)

    try:
        status = ask(address, pieces()).status_code  # type: ignore[arg-type]
    except requests.ConnectionError:
        return  # The server may close before everything was sent.
    assert status == 413


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}]
)
def test_pages_from_elsewhere_are_refused(
    address: str, digits: Tensor, headers: dict[str, str]
) -> None:
    answer = ask(address, png(digits[0]), headers=headers)
    assert answer.status_code == 403
    assert ask(address, png(digits[0]), headers={"Origin": address}).status_code == 200


def test_paths_and_methods_that_are_not_there(address: str) -> None:
    assert requests.get(f"{address}/predict", timeout=60).status_code == 405
    assert requests.get(f"{address}/nothing", timeout=60).status_code == 404
    assert "/nothing" not in requests.get(f"{address}/metrics", timeout=60).text


class Held(Answerer):
    """Answers when it is let."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, certificates=False)
        self.let, self.begun = threading.Event(), threading.Event()

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        self.begun.set()
        assert self.let.wait(60)
        return super().__call__(images)


def test_more_than_may_wait_is_refused_and_the_rest_is_answered(
    model: nn.Module, digits: Tensor
) -> None:
    held = Held(model)
    app = prediction_app(held, "digits", Limits(seconds=60, largest_batch=4, waiting=3))
    with running(app) as place, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, place, png(digits[0]))
        assert held.begun.wait(60)
        others = [pool.submit(ask, place, png(digits[i])) for i in range(1, 4)]
        until(lambda: waiting(place) == 3)
        refused = ask(place, png(digits[5]))
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        held.let.set()
        assert first.result().status_code == 200
        assert [other.result().status_code for other in others] == [200] * 3


def test_what_takes_too_long_is_told_and_leaves_the_queue(model: nn.Module, digits: Tensor) -> None:
    held = Held(model)
    with running(prediction_app(held, "digits", Limits(seconds=0.3))) as place:
        assert ask(place, png(digits[0])).status_code == 504
        held.let.set()
        until(lambda: ask(place, png(digits[1])).status_code == 200)


def test_a_connection_that_sends_nothing_more_harms_nobody(address: str, digits: Tensor) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nab")
        assert ask(address, png(digits[0])).status_code == 200


def test_one_that_fails_does_not_take_others_along(model: nn.Module, digits: Tensor) -> None:
    class Picky(Answerer):
        def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
            if any(float(image.max()) == 0 for image in images):
                raise RuntimeError("black")
            return super().__call__(images)

    picky = Picky(model, certificates=False)
    app = prediction_app(picky, "digits", Limits(seconds=60))
    with running(app) as place, ThreadPoolExecutor(8) as pool:
        bodies = [png(torch.zeros(1, 8, 8)) if i % 4 == 0 else png(digits[i]) for i in range(16)]
        statuses = [answer.status_code for answer in pool.map(lambda b: ask(place, b), bodies)]
    assert statuses == [500 if i % 4 == 0 else 200 for i in range(16)]


def test_a_generator_is_not_served() -> None:
    with pytest.raises(ValueError, match=r"take one of eq\.load"):
        Answerer(eq.create_model("opteq-decoder", latent_dim=4, image_size=16))


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equilibria.cli.serve.find_spec", lambda name: None)
    said = invoke("serve", tmp_path)
    assert said.exit_code == 2
    assert "pip install 'equilibria[serve]'" in said.stderr


def waiting(address: str) -> int:
    return int(requests.get(f"{address}/health", timeout=60).json()["waiting"])


def until(holds: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_names_that_a_server_may_be_called_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts("127.0.0.1", None) == (*LOOPBACK, "127.0.0.1")
    assert hosts("0.0.0.0", ["Models.Example.org", "10.0.0.7"])[-2:] == (
        "models.example.org",
        "10.0.0.7",
    )
    assert capsys.readouterr().out == ""
    assert "example.org" not in hosts("0.0.0.0", None)
    assert "--name" in capsys.readouterr().out
    for wrong in ("*", "http://example.org", "example.org:8000", ""):
        with pytest.raises(ValueError, match="not the name of a host"):
            hosts("0.0.0.0", [wrong])

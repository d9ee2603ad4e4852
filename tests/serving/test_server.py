"""A model served over the loopback interface."""

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
from equilibria.serving.compiling import CompiledSolves
from equilibria.serving.server import LOOPBACK
from tests.program import invoke
from tests.serving.running import png, running

CLIENTS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    result = invoke(
        *("train", "digits-opteq", "training.epochs=3", "model.options.channels=8"),
        *("data.options.test_samples=12", "--output", folder),
    )
    assert result.exit_code == 0, result.output
    return eq.load(folder)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Test digits, rounded to 8 bits like image files."""
    return (load_digits().test.images[:40] * 255).round() / 255


@pytest.fixture(scope="module")
def address(model: nn.Module) -> Iterator[str]:
    limits = Limits(megabytes=0.2, seconds=60)
    with running(prediction_app(Answerer(model), "digits", limits)) as url:
        yield url


def post(address: str, content: bytes, **options: object) -> requests.Response:
    return requests.post(f"{address}/predict", data=content, timeout=60, **options)  # type: ignore[arg-type]


def test_answers_match_predict_and_certify(model: nn.Module, digits: Tensor, address: str) -> None:
    answer = post(address, png(digits[0])).json()
    (prediction,) = eq.predict(model, digits[:1], top=5)
    assert answer["label"] == prediction.label
    assert answer["confidence"] == pytest.approx(prediction.confidence, abs=1e-5)
    assert list(answer["top"]) == list(prediction.top)
    certificate = eq.certify(model, digits[:1], refine=False)
    assert answer["certified"] == bool(certificate.certified_class[0])
    assert answer["radius"] == pytest.approx(float(certificate.radius[0]), rel=1e-6)
    assert answer["error"] == pytest.approx(float(certificate.error[0]), rel=1e-3)
    assert answer["margin"] > answer["margin_error"] > 0


def test_concurrent_clients_get_their_own_answers(
    model: nn.Module, digits: Tensor, address: str
) -> None:
    """64 clients at once, some of whose requests are not images."""
    labels = [prediction.label for prediction in eq.predict(model, digits)]
    assert len(set(labels)) > 3
    bodies = [png(digit) for digit in digits]

    def client(number: int) -> list[tuple[int, int, dict[str, object]]]:
        results = []
        for turn in range(3):
            index = (number * 7 + turn * 13) % len(bodies)
            if (number + turn) % 8 == 0:
                response = post(address, bodies[index][:30] + bytes(turn))
                results.append((-1, response.status_code, response.json()))
            else:
                response = post(address, bodies[index])
                results.append((index, response.status_code, response.json()))
        return results

    with ThreadPoolExecutor(CLIENTS) as pool:
        results = [result for part in pool.map(client, range(CLIENTS)) for result in part]
    assert len(results) == 3 * CLIENTS
    for index, status, answer in results:
        if index < 0:
            assert status == 400
            assert "cannot be read as an image" in str(answer["error"])
        else:
            assert status == 200
            assert answer["label"] == labels[index]
    metrics = requests.get(f"{address}/metrics", timeout=60).text
    assert 'equilibria_requests_total{path="/predict",status="200"}' in metrics
    assert 'equilibria_request_seconds_bucket{le="+Inf"}' in metrics


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, "empty"),
        (b"hello", 400, "cannot be read as an image"),
        (bytes(300_000), 413, "send a smaller image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400, "cannot be read"),
    ],
    ids=["empty", "text", "too large", "eps"],
)
def test_invalid_bodies_are_rejected(
    address: str, content: bytes, status: int, message: str
) -> None:
    response = post(address, content)
    assert response.status_code == status
    assert message in response.json()["error"]
    assert requests.get(f"{address}/health", timeout=60).json()["status"] == "ok"


def test_forms_with_one_file_are_accepted(address: str, digits: Tensor) -> None:
    content = png(digits[0])
    expected = post(address, content).json()
    form = {"file": ("digit.png", content, "image/png")}
    for options in ({"files": form}, {"files": form, "data": {"note": "a zero"}}):
        response = requests.post(f"{address}/predict", timeout=60, **options)  # type: ignore[arg-type]
        assert response.status_code == 200
        assert response.json() == expected


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n'
NOTE = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nhello\r\n'


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
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
        (FILE + bytes(300_000) + b"\r\n--b--\r\n", FORM, 413, "send a smaller image"),
    ],
    ids=[
        *("two files", "text only", "no field", "empty file", "cut off", "no form", "no headers"),
        *("many fields", "no boundary", "no picture", "too large"),
    ],
)
def test_forms_without_exactly_one_image_are_rejected(
    address: str, content: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    response = post(address, content, headers=headers)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_prediction_and_certificate_share_one_solve(digits: Tensor) -> None:
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


@pytest.mark.parametrize(("name", "layers"), [("digits-opteq", 1), ("cifar10-certified", 9)])
def test_requests_take_one_solve_per_layer(name: str, layers: int, digits: Tensor) -> None:
    counting = Counting(eq.load(name))
    with running(prediction_app(counting, name)) as url:
        assert post(url, png(digits[0])).status_code == 200
    assert counting.solves == [layers]


@pytest.mark.parametrize("certificates", [True, False])
def test_graphs_are_prepared_while_requests_are_answered(
    digits: Tensor, certificates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the traced graphs without a compiler, which takes less time."""
    monkeypatch.setattr("equilibria.compiled.store.compile_graph", lambda graph, _: (graph, 0.0))
    monkeypatch.setattr(CompiledSolves, "_is_faster", lambda *_: True)
    answerer = Answerer(eq.load("digits-opteq"), certificates=certificates)
    with running(prediction_app(answerer, "digits", Limits(seconds=60))) as url:
        eager = [post(url, png(digit)).json() for digit in digits[:3]]
        assert requests.get(f"{url}/health", timeout=60).json()["backend"] == "eager"
        assert 'batches_total{backend="compiled"} 0' in metrics_of(url)
        preparation = threading.Thread(target=answerer.compile, args=(2,))
        preparation.start()
        during = [post(url, png(digits[0])) for _ in range(5)]
        preparation.join()
        compiled = [post(url, png(digit)).json() for digit in digits[:3]]
        assert requests.get(f"{url}/health", timeout=60).json()["backend"] == "compiled"
        assert "largest_compiled_batch 2" in metrics_of(url)
    assert all(response.json()["label"] == eager[0]["label"] for response in during)
    assert answerer.batches["compiled"] >= 3
    for before, after in zip(eager, compiled, strict=True):
        for name in ("label", "converged", "certified", "reason"):
            assert before[name] == after[name]
        assert after["confidence"] == pytest.approx(before["confidence"], abs=1e-3)
        if certificates:
            # Both errors are bounds of a solve to the same tolerance.
            assert abs(before["margin"] - after["margin"]) <= (
                before["margin_error"] + after["margin_error"]
            )


def test_larger_batches_than_the_compiled_ones_are_solved_eagerly(
    digits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answerer = Answerer(eq.load("digits-opteq"))
    monkeypatch.setattr(CompiledSolves, "_compiles", lambda *_: True)
    decisions = iter([True, False])
    monkeypatch.setattr(CompiledSolves, "_is_faster", lambda *_: next(decisions))
    answerer.compile(32)
    assert [answerer.compiled_solves.backend(samples) for samples in (1, 2)] == [
        "compiled",
        "eager",
    ]
    answerer(list(digits[:3]))
    assert answerer.batches == {"eager": 1}


def test_models_without_a_graph_are_served_eagerly(
    digits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("equilibria.compiled.store.compile_graph", fails)
    answerer = Answerer(eq.load("digits-opteq"))
    with pytest.warns(eq.compiled.CompileWarning, match="no compiler"):
        answerer.compile(32)
    assert answerer.compiled_solves.backend(1) == "eager"
    assert answerer([digits[0]])[0].label == "0"


def test_predictions_of_unrolled_models_are_their_last_iterates(digits: Tensor) -> None:
    """The certificate applies to the equilibrium, which is a different state."""
    model = eq.create_model("opteq-small", in_channels=1)
    model.images = eq.load("digits-opteq").images
    with eq.solving(model, gradient="unrolled"):
        (answer,) = Answerer(model)([digits[0]])
        (prediction,) = eq.predict(model, digits[:1])
    assert (answer.iterations, answer.confidence) == (prediction.iterations, prediction.confidence)


@pytest.mark.parametrize("side", [6_000, 15_000])
def test_images_with_too_many_pixels_are_not_decoded(address: str, side: int) -> None:
    content = io.BytesIO()
    Image.new("1", (side, side)).save(content, "PNG")
    assert len(content.getvalue()) < 200_000
    response = post(address, content.getvalue())
    assert response.status_code == 400
    assert "more than 25,000,000 pixels" in response.json()["error"]


def test_size_limit_applies_to_bodies_without_a_length(address: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(10_000)

    try:
        status = post(address, pieces()).status_code  # type: ignore[arg-type]
    except requests.ConnectionError:
        return  # the server may close the connection before everything is sent
    assert status == 413


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}]
)
def test_requests_from_other_sites_and_for_other_hosts_are_rejected(
    address: str, digits: Tensor, headers: dict[str, str]
) -> None:
    response = post(address, png(digits[0]), headers=headers)
    assert response.status_code == 403
    assert post(address, png(digits[0]), headers={"Origin": address}).status_code == 200


def test_unknown_paths_and_methods(address: str) -> None:
    assert requests.get(f"{address}/predict", timeout=60).status_code == 405
    assert requests.get(f"{address}/nothing", timeout=60).status_code == 404
    assert "/nothing" not in requests.get(f"{address}/metrics", timeout=60).text


class BlockedAnswerer(Answerer):
    """Answers only after `released` is set."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, certificates=False)
        self.started, self.released = threading.Event(), threading.Event()

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        self.started.set()
        assert self.released.wait(60)
        return super().__call__(images)


def test_requests_above_the_queue_limit_get_503_and_others_are_answered(
    model: nn.Module, digits: Tensor
) -> None:
    answerer = BlockedAnswerer(model)
    app = prediction_app(answerer, "digits", Limits(seconds=60, largest_batch=4, waiting=3))
    with running(app) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, url, png(digits[0]))
        assert answerer.started.wait(60)
        others = [pool.submit(post, url, png(digits[i])) for i in range(1, 4)]
        until(lambda: waiting(url) == 3)
        refused = post(url, png(digits[5]))
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        answerer.released.set()
        assert first.result().status_code == 200
        assert [other.result().status_code for other in others] == [200] * 3


def test_requests_above_the_time_limit_get_504_and_leave_the_queue(
    model: nn.Module, digits: Tensor
) -> None:
    answerer = BlockedAnswerer(model)
    with running(prediction_app(answerer, "digits", Limits(seconds=0.3))) as url:
        assert post(url, png(digits[0])).status_code == 504
        answerer.released.set()
        until(lambda: post(url, png(digits[1])).status_code == 200)


def test_stalled_connections_do_not_block_others(address: str, digits: Tensor) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nab")
        assert post(address, png(digits[0])).status_code == 200


def test_failing_images_do_not_affect_others_in_their_batch(
    model: nn.Module, digits: Tensor
) -> None:
    class FailsOnBlack(Answerer):
        def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
            if any(float(image.max()) == 0 for image in images):
                raise RuntimeError("black")
            return super().__call__(images)

    answerer = FailsOnBlack(model, certificates=False)
    app = prediction_app(answerer, "digits", Limits(seconds=60))
    with running(app) as url, ThreadPoolExecutor(8) as pool:
        bodies = [png(torch.zeros(1, 8, 8)) if i % 4 == 0 else png(digits[i]) for i in range(16)]
        statuses = [response.status_code for response in pool.map(lambda b: post(url, b), bodies)]
    assert statuses == [500 if i % 4 == 0 else 200 for i in range(16)]


def test_generators_cannot_be_served() -> None:
    with pytest.raises(ValueError, match=r"load a trained model with eq\.load"):
        Answerer(eq.create_model("opteq-decoder", latent_dim=4, image_size=16))


def test_command_reports_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equilibria.cli.serve.find_spec", lambda name: None)
    result = invoke("serve", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'equilibria[serve]'" in result.stderr


def metrics_of(address: str) -> str:
    return requests.get(f"{address}/metrics", timeout=60).text


def waiting(address: str) -> int:
    return int(requests.get(f"{address}/health", timeout=60).json()["waiting"])


def until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_accepted_host_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts("127.0.0.1", None) == (*LOOPBACK, "127.0.0.1")
    assert hosts("0.0.0.0", ["Models.Example.org", "10.0.0.7"])[-2:] == (
        "models.example.org",
        "10.0.0.7",
    )
    assert capsys.readouterr().out == ""
    assert "example.org" not in hosts("0.0.0.0", None)
    assert "--name" in capsys.readouterr().out
    for invalid in ("*", "http://example.org", "example.org:8000", ""):
        with pytest.raises(ValueError, match="not a host name"):
            hosts("0.0.0.0", [invalid])

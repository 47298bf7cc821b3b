"""The processor's process: what it answers, and what it survives."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_images import picture, saved

from octavo.config import MediaConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError, RequestError
from octavo.multimodal.client import ImageProcessorClient
from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.sources import FileImage, PixelImage, from_object

LIMITS = ImageLimits(max_images=4, max_bytes=10**6, max_pixels=10_000, timeout_s=60.0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageProcessorClient]:
    folder = tmp_path_factory.mktemp("llava")
    saved("llava", folder)
    client = ImageProcessorClient(str(folder), LIMITS)
    yield client
    client.close()


def as_file(image: Image.Image, kind: str = "PNG") -> FileImage:
    file = io.BytesIO()
    image.save(file, kind)
    return FileImage(file.getvalue(), "here")


def test_equal_pictures_have_equal_digests_and_others_have_not(client: ImageProcessorClient) -> None:
    """Case PC-07: sizes and modes count as far as the model sees them."""
    image = picture(1, (30, 40))
    pixels = image.tobytes()
    whole = client.process(from_object(image, "a", 10**6))
    assert client.process(as_file(image)) == whole
    assert client.process(PixelImage((40, 30), pixels, "b")).digest != whole.digest
    assert client.process(as_file(picture(2, (30, 40)))).digest != whole.digest
    palette = image.convert("P")
    assert client.process(as_file(palette)).digest == client.process(as_file(palette.convert("RGB"))).digest
    assert client.process(as_file(palette)).digest != whole.digest
    grey = image.convert("L")
    assert client.process(as_file(grey)).digest == client.process(from_object(grey, "c", 10**6)).digest
    assert len(whole.token_ids) == 16


def test_a_turned_picture_is_turned_back(client: ImageProcessorClient) -> None:
    image = picture(3, (20, 40))
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate 90 degrees clockwise to show it"
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    assert client.process(FileImage(file.getvalue(), "here")).digest == client.process(as_file(image)).digest


def test_broken_and_large_pictures_are_refused(client: ImageProcessorClient) -> None:
    whole = as_file(picture(1))
    for data, message in (
        (whole.data[:100], "can't be decoded"),
        (b"GIF89a" + b"\xff" * 40, "image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (as_file(picture(1, (200, 60))).data, "--max-image-pixels"),
        (as_file(picture(1), "TIFF").data, "no image in a format"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            client.process(FileImage(data, "here"))
        assert caught.value.param == "here"
    assert client.process(whole).token_ids


def test_a_process_that_dies_or_hangs_is_replaced(client: ImageProcessorClient) -> None:
    before = client.process(as_file(picture(5)))
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    hurried, client._limits = client._limits, replace(LIMITS, timeout_s=0.2)
    with pytest.raises(RequestError, match="--media-timeout-s"):
        client.process(as_file(picture(6)))
    client._limits = hurried
    assert client.process(as_file(picture(5))) == before
    assert client.pid != pid
    os.kill(client.pid or 0, signal.SIGKILL)
    with pytest.raises(RequestError, match="can't be processed"):
        client.process(as_file(picture(6)))
    assert client.process(as_file(picture(5))) == before


def test_an_image_that_takes_too_much_memory_costs_nobody_else(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    limits = replace(LIMITS, max_pixels=10**8)
    client = ImageProcessorClient(str(tmp_path), limits, spare_bytes=80 << 20)
    small = client.process(as_file(picture(1)))
    pid = client.pid
    for image in (Image.new("RGB", (9000, 9000), (9, 9, 9)), Image.new("L", (6000, 6000))):
        with pytest.raises(RequestError, match=r"memory|can't be"):
            client.process(as_file(image))
    assert client.process(as_file(picture(1))) == small
    assert client.pid == pid
    client.close()


def test_a_line_is_no_picture(client: ImageProcessorClient) -> None:
    """Its short side would be scaled up, and the long one with it."""
    for size in ((1, 201), (201, 1), (9_000, 1)):
        with pytest.raises(RequestError, match="200 times"):
            client.process(as_file(Image.new("RGB", size)))
        with pytest.raises(RequestError, match="200 times"):
            client.process(from_object(Image.new("RGB", size), "a", 10**6))
    assert client.process(as_file(Image.new("RGB", (1, 1)))).token_ids
    assert client.process(as_file(Image.new("RGB", (200, 1)))).token_ids


def test_a_folder_without_a_processor_says_so(tmp_path: Path) -> None:
    client = ImageProcessorClient(str(tmp_path), LIMITS)
    with pytest.raises(ModelError, match="processor of images"):
        client.process(as_file(picture(1)))
    client.close()


@pytest.mark.parametrize("text", ["4", '{"image": -1}', '{"image": true}', '{"video": 1}', '{"picture": 1}', "{"])
def test_senseless_limits_are_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        ImageLimits.of(MediaConfig(limit_mm_per_prompt=text))


def test_a_close_while_the_process_is_made_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ImageProcessorClient(str(tmp_path), LIMITS)
    made: list[subprocess.Popen[bytes]] = []
    closing = threading.Thread(target=client.close)
    popen = subprocess.Popen

    def slow(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **options))
        closing.start()
        while not client._closed:
            closing.join(0.001)
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.placeholder()
    closing.join(30)
    assert made[0].returncode == -signal.SIGKILL
    assert client.pid is None

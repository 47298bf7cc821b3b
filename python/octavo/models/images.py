"""The image side of a Transformers image-text class: pixels to embeddings, and positions in three dimensions.

Not here:
which families are taken (image_families.py), the processor that makes tensors of pixels (multimodal/processor.py), and
where embeddings go (attention/media.py).

Shape suffixes: i tokens that stand for an image, p positions of a prompt, m model dim.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from octavo.attention.media import MediaInput
from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.image_families import IMAGE_FAMILIES
from octavo.models.image_trial import compare, record

Ints = npt.NDArray[np.int64]


class ImageEncoder:
    """Runs what of a Transformers image-text model is not its text model. The module belongs to somebody else; it has
    its text model, whose embeddings of tokens are `embed`, at `text_name`.

    Attributes:
        base: The module.
        dtype: Of what it reads and gives.
        is_known: The family was compared with Transformers; others are tried out first (`try_out`).
        token_id: The token that stands for one output of the encoder.
        is_whole: An image's tokens attend to each other in both directions.
        numbers_positions: Rotations go by time, height and width.
    """

    def __init__(
        self,
        base: Any,
        text_name: str,
        embed: Callable[[Tensor], Tensor],
        raw: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        is_run_by_class: bool,
    ) -> None:
        """`is_run_by_class`: steps go through `base` to its text model, embeddings and all."""
        self._is_run_by_class = is_run_by_class
        self.base = base
        self._text_name = text_name
        self._embed = embed
        self.dtype = dtype
        self._names = inspect.signature(self.base.get_image_features).parameters
        self.token_id = int(self.base.config.image_token_id)
        self.is_known = raw["model_type"] in IMAGE_FAMILIES
        self.is_whole = IMAGE_FAMILIES.get(raw["model_type"], False)
        self.numbers_positions = hasattr(base, "get_rope_index")

    @property
    def width(self) -> int:
        """Values that it gives a token: an embedding, and deep features (Qwen3-VL)."""
        vision = getattr(self.base.config, "vision_config", None)
        deep: Sequence[int] = getattr(vision, "deepstack_visual_indexes", None) or ()
        return int(self.base.config.get_text_config().hidden_size) * (1 + len(deep))

    def weight_bytes(self) -> int:
        """Of all but the text model."""
        parts = [part for name, part in self.base.named_children() if name != self._text_name]
        return sum(x.nbytes for part in parts for x in (*part.parameters(), *part.buffers()))

    def encode_equal(self, images: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[Tensor]:
        """Embeddings of images whose `kind` is equal, [i, m] of each, from one call. Where the class fails over a
        single image, it gets it twice: some take a batch of one for none (Mistral 3's, over an image of one token)."""
        if len(images) == 1:
            try:
                return [self.encode(images[0], device)]
            except (RuntimeError, ValueError, IndexError):
                return self.encode_equal([images[0], images[0]], device)[:1]
        joined = {name: torch.cat([image[name] for image in images]) for name in images[0]}
        return [part.clone() for part in self.encode(joined, device).chunk(len(images))]  # each is freed by itself

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, Tensor], device: torch.device, *, keep_host: bool = False) -> Tensor:
        """One image's embeddings [i, m]. Deep features (Qwen3-VL), if there are any, follow: [i, m * (1 + layers)].
        `keep_host`: integers (sizes) stay on the host."""
        output = self.base.get_image_features(**self._taken(tensors, self._names, device, keep_host=keep_host))
        parts = [_joined(output.pooler_output)]
        parts += [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        return torch.cat(parts, dim=-1).to(self.dtype)

    def _taken(
        self, tensors: Mapping[str, Tensor], names: Collection[str], device: torch.device, *, keep_host: bool = False
    ) -> dict[str, Tensor]:
        """Those that a function takes, as the model has them."""
        taken = {name: x for name, x in tensors.items() if name in names}
        return {
            name: x.to(device, self.dtype) if x.is_floating_point() else x if keep_host else x.to(device)
            for name, x in taken.items()
        }

    def positions(
        self, token_ids: Sequence[int] | Ints, places: Sequence[Ints], images: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Tensor, int]:
        """Positions [3, p] of a sequence whose prompt has these images, each at its places, and how far later positions
        are from plain ones. Transformers takes image tokens without text between them for one image, so a token is put
        between such, which moves what follows by one, and is taken out again."""
        ids, kinds = np.asarray(token_ids, dtype=np.int64), np.zeros(len(token_ids), dtype=np.int32)
        kinds[np.concatenate(places)] = 1
        gaps = [int(b[0]) for a, b in itertools.pairwise(places) if b[0] == a[-1] + 1]
        position_31p, shift = self.base.get_rope_index(
            input_ids=torch.from_numpy(np.insert(ids, gaps, 0)).unsqueeze(0),
            mm_token_type_ids=torch.from_numpy(np.insert(kinds, gaps, 0)).unsqueeze(0),
            image_grid_thw=torch.cat([image["image_grid_thw"] for image in images]),
        )
        is_own = np.insert(np.ones(len(ids), dtype=bool), gaps, False)
        num_before_p = np.cumsum(~is_own)[is_own]
        return position_31p[:, 0, is_own] - torch.from_numpy(num_before_p), int(shift)

    @torch.inference_mode()
    def try_out(
        self,
        token_ids: Sequence[int],
        inputs: Mapping[str, Tensor],
        images: Sequence[tuple[int, int, Mapping[str, Tensor]]],
        device: torch.device,
    ) -> None:
        """Read a prompt with images (start, length, tensors each), of which the processor made `inputs` as a whole, as
        the class does and as Octavo does. ModelError says why that is not the same."""
        token_id_t = torch.tensor(token_ids, device=device)
        media, places = MediaInput(), []
        try:
            for start, length, tensors in images:
                place_i = start + np.flatnonzero(np.asarray(token_ids[start : start + length]) == self.token_id)
                feature_im = self.encode(tensors, device)
                twin_im = self.encode_equal([tensors, tensors], device)[-1]
                if twin_im.shape != feature_im.shape or not _are_close(twin_im, feature_im, self.dtype):
                    raise ModelError("it makes other embeddings of two pictures at once than of each")
                if not len(place_i) or feature_im.shape != (len(place_i), self.width):
                    raise ModelError(
                        f"it makes {len(feature_im)} embeddings for {len(place_i)} image tokens,"
                        f" of {feature_im.shape[-1]} numbers where {self.width} are expected"
                    )
                places.append(place_i)
                media.add_features(place_i, feature_im)
            position_3t: Tensor | None = None
            if self.numbers_positions:
                position_3t, _ = self.positions(token_ids, places, [tensors for _, _, tensors in images])
            taken = self._taken(inputs, inspect.signature(self.base.forward).parameters, device)
            embedded_tm = media.finish(device).embedded(self._embed(token_id_t))
            calls: list[dict[str, Any]] = [{"input_ids": token_id_t.unsqueeze(0), **taken}]
            if self._is_run_by_class and media.deep_features(*embedded_tm.shape) is None:
                position = torch.arange(len(token_ids), device=device).unsqueeze(0)
                position = position if position_3t is None else position_3t.unsqueeze(1).to(device)
                calls.append({"inputs_embeds": embedded_tm.unsqueeze(0), "position_ids": position, "use_cache": False})
            tolerance, problem = TRIAL_TOLERANCE[self.dtype], ""
            for call in calls:
                given = record(self.base, self._text_name, self._embed, **call)
                problem = problem or compare(given, media, embedded_tm, position_3t, tolerance)
        except ModelError:
            raise
        except Exception as error:  # foreign code, any error means the same
            raise ModelError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if problem:
            raise ModelError(problem)


TEXT_MODELS = ("language_model", "text_model")
"""Where classes keep their text model."""

TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def image_encoder(
    base: Any,
    config: NormalConfig,
    dtype: torch.dtype,
    text_name: str,
    embed: Callable[[Tensor], Tensor],
    attentions: Collection[nn.Module] = (),
) -> ImageEncoder | None:
    """Of the model under a Transformers class's head, whose decoder has these attention modules; None where nothing
    tells how it reads images."""
    if not text_name or not hasattr(base, "get_image_features"):
        return None
    if not isinstance(getattr(base.config, "image_token_id", None), int):
        return None
    for part in base.children():
        if not any(module in attentions for module in part.modules()):
            _attend_by_itself(part)
    return ImageEncoder(base, text_name, embed, config.raw, dtype, is_run_by_class=bool(attentions))


def _attend_by_itself(part: nn.Module) -> None:
    """An encoder's attention has no cache: PyTorch's own runs it, not the one that the decoder's was replaced with."""
    for module in part.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and not hasattr(config, "text_config"):  # the whole's: it passes on
            config._attn_implementation = "sdpa"


def _are_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    tolerance = TRIAL_TOLERANCE[dtype]
    return torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)


def kind(tensors: Mapping[str, Tensor]) -> Hashable:
    """Equal for images whose tensors may be put behind each other for one call: those of one size."""
    return tuple(
        (name, x.shape, x.dtype, None if x.is_floating_point() else x.numpy().tobytes())
        for name, x in sorted(tensors.items())
    )


def num_values(tensors: Mapping[str, Tensor]) -> int:
    """Floating-point numbers that an encoder reads."""
    return sum(x.numel() for x in tensors.values() if x.is_floating_point())


def _joined(output: Any) -> Tensor:
    """[i, m] from one tensor, or from one an image."""
    if isinstance(output, Tensor):
        return output.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in output])

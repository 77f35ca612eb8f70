"""The body of `/generate`: SGLang's fields, our own beside them, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from sidestream.api.fields import OUTPUTS, SAMPLING, HiddenStatesFormat, OutputsPerPrompt, SharedSampling, called, sampling_of
from sidestream.api.foreign import refuse_foreign, with_foreign
from sidestream.api.hidden import check_format
from sidestream.api.prompts import MAX_PROMPTS, read_prompts
from sidestream.async_client import AsyncEngine
from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.params import OutputParams, SamplingParams, outputs_per_prompt, per_prompt

MAX_RID = 128  # characters
NOT_YET = "it is not supported yet"
NO_MEDIA = "the model reads text only"
NO_EXPERTS = "the model has no such parts"
ONE_PROCESS = "this server is one process"

REFUSED_SAMPLING: Mapping[str, str] = {
    "no_stop_trim": "the text ends before the stop string; output_ids have all of it",
    "custom_params": "there are no custom logit processors",
    "beam_width": "there is no beam search",
    "watermark": "there are no watermarks",
}
IGNORED_SAMPLING = ("spaces_between_special_tokens", "stream_interval")

REFUSED: Mapping[str, str] = {
    "input_embeds": "a prompt is text or input_ids",
    "positional_embed_overrides": "a prompt is text or input_ids",
    **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities", "mm_hashes", "mm_content_hashes"), NO_MEDIA),
    **dict.fromkeys(("use_audio_in_video", "video_config", "mm_processor_kwargs", "images_config"), NO_MEDIA),
    **dict.fromkeys(("lora_path", "lora_id"), "there are no LoRA adapters"),
    "custom_logit_processor": "there are no custom logit processors",
    "session_params": "there are no sessions; cached prefixes serve a conversation that is sent whole",
    "return_sampling_mask": NOT_YET,
    "sampling_logprobs_mode": NOT_YET,
    "return_entropy": NOT_YET,
    "watermark": "there are no watermarks",
    **dict.fromkeys(("return_routed_experts", "routed_experts_start_len", "return_indexer_topk", "return_bytes"), NO_EXPERTS),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"), ONE_PROCESS),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_hints"), ONE_PROCESS),
    "background": "there is no store of answers",
    "priority": "requests have no priorities",
    **dict.fromkeys(("extra_key", "cache_salt"), "cached prefixes are shared by all requests; --disable-radix-cache turns them off"),
    "return_flat_raw_top_logprobs": 'use logprobs_format "flat"',
    "return_flat_raw_output_top_logprobs": 'use logprobs_format "flat"',
    "return_flat_raw_top_logprobs_b64": 'use logprobs_format "flat"',
}
IGNORED = (
    "log_metrics",
    "no_logs",
    "custom_labels",
    "session_id",
    "conversation_id",
    "routing_key",
    "external_trace_header",
    "received_time",
)

if TYPE_CHECKING:
    SamplingFields = SharedSampling
    Fields = OutputsPerPrompt
else:
    SamplingFields = with_foreign("SamplingFields", SharedSampling, refused=REFUSED_SAMPLING, ignored=IGNORED_SAMPLING)
    Fields = with_foreign("Fields", OutputsPerPrompt, refused=REFUSED, ignored=IGNORED)

Rid = Annotated[str, Meta(min_length=1, max_length=MAX_RID)]


class Sampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    sampling_seed: Annotated[int, Meta(description="The same as seed.")] | None = None


class Generate(Fields, kw_only=True, forbid_unknown_fields=True):
    text: (
        Annotated[
            str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)],
            Meta(description="A prompt, or a list of them.", examples=["The capital of France is"]),
        ]
        | None
    ) = None
    input_ids: Annotated[list[int | list[int]], Meta(description="The same as token ids.")] | None = None
    sampling_params: Annotated[Sampling | list[Sampling], Meta(description="For all prompts, or a list with one for each.")] | None = None
    rid: (
        Annotated[Rid | list[Rid], Meta(description="Id for /abort_request; with a list of prompts a list, or what theirs begin with.")]
        | None
    ) = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events, each with all of the text so far.")] | None = None
    incremental: Annotated[bool, Meta(description="In a stream, only what is new.")] | None = None
    return_text_in_logprobs: Annotated[bool, Meta(description="Write the text of each token, too.")] | None = None
    return_prompt_token_ids: Annotated[bool, Meta(description="Return prompt_token_ids.")] | None = None
    logprobs_format: Annotated[Literal["sglang", "flat"], Meta(description="SGLang's lists, or base64 arrays.")] | None = None
    hidden_states_format: Annotated[HiddenStatesFormat, Meta(description="How hidden states are written.")] | None = None
    model: Annotated[str, Meta(description="Name of the model; may be left out.")] | None = None
    require_reasoning: Annotated[bool, Meta(description="The same as in sampling_params, for all prompts.")] | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=0, description="The same as in sampling_params, for all prompts.")] | None = None


@dataclass(frozen=True)
class Asked:
    """What a body asks for, in our own words. Lists have one value for each prompt."""

    prompts: list[list[int]]
    listed: bool  # whether a list of prompts was sent
    sampling: list[SamplingParams]
    outputs: dict[str, list[Any]]  # keywords for generate
    wanted: list[OutputParams]  # the same, prompt by prompt
    rids: list[str] | None
    hidden_format: HiddenStatesFormat
    flat: bool
    names: Mapping[str, str]  # what the body calls the engine's fields

    def first_answer(self, place: int) -> int:
        """Which of all answers is the first one of a prompt."""
        return sum(each.n for each in self.sampling[:place])


async def asked_for(engine: AsyncEngine, body: Generate) -> Asked:
    """Raises InvalidRequest."""
    refuse_foreign(body, REFUSED)
    given = {name: value for name, value in (("text", body.text), ("input_ids", body.input_ids)) if value is not None}
    if len(given) != 1:
        raise InvalidRequest("text", f"got {'both' if given else 'neither'} of text and input_ids, must be one of them")
    ((field, value),) = given.items()
    ids, listed = await read_prompts(engine, value, field)
    outputs = _outputs(body, len(ids))
    wanted = outputs_per_prompt(outputs, len(ids))
    form = check_format(body.hidden_states_format, wanted=any(each.return_hidden_states for each in wanted), streamed=bool(body.stream))
    flat = body.logprobs_format == "flat"
    if flat and not any(each.return_logprob for each in wanted):
        raise InvalidRequest("logprobs_format", "got 'flat', must be left out without return_logprob")
    if flat and body.return_text_in_logprobs:
        raise InvalidRequest("return_text_in_logprobs", 'got true, must be left out with logprobs_format "flat": arrays hold no texts')
    if body.incremental and not body.stream:
        raise InvalidRequest("incremental", "got true, must be left out without stream")
    return Asked(
        ids,
        listed,
        _sampling(body, len(ids)),
        outputs,
        wanted,
        _rids(body.rid, len(ids), listed),
        form,
        flat,
        {"prompt": field, **{name: f"sampling_params.{name}" for name in SAMPLING}},
    )


def _outputs(body: Generate, count: int) -> dict[str, list[Any]]:
    """A null among the values of a list is not given, too."""
    given = {name: per_prompt(name, value, count) for name in OUTPUTS if (value := getattr(body, name)) is not None}
    return {name: [OUTPUTS[name].default if each is None else each for each in values] for name, values in given.items()}


def _sampling(body: Generate, count: int) -> list[SamplingParams]:
    given = body.sampling_params
    common = {name: getattr(body, name) for name in ("require_reasoning", "max_thinking_tokens")}
    if isinstance(given, list):
        bodies = per_prompt("sampling_params", given, count)
        return [_params(each, f"sampling_params.{place}.", common) for place, each in enumerate(bodies)]
    assert given is None or isinstance(given, Sampling)
    return [_params(Sampling() if given is None else given, "sampling_params.", common)] * count


def _params(body: Sampling, within: str, common: Mapping[str, Any]) -> SamplingParams:
    refuse_foreign(body, REFUSED_SAMPLING, within=within)
    seed = getattr(body, "seed", None)
    if None not in (seed, body.sampling_seed) and seed != body.sampling_seed:
        raise InvalidRequest(f"{within}seed", f"got {shown(seed)} beside sampling_seed={body.sampling_seed}, must be the same")
    with called({name: f"{within}{name}" for name in SAMPLING}):
        return sampling_of(body, {"seed": body.sampling_seed, **common})


def _rids(rid: str | list[str] | None, count: int, listed: bool) -> list[str] | None:
    if isinstance(rid, str):
        return [f"{rid}_{place}" for place in range(count)] if listed else [rid]
    return None if rid is None else per_prompt("rid", rid, count)

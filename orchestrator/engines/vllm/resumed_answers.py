"""An answer that another engine has begun goes on in this one as if it had begun here.

The router sends prompt and answer so far as one prompt, and says how many of its last tokens are
the answer's beginning. To vLLM's engine core they are prompt; to the part that turns tokens into
text they must be answer: a character or a stop string may begin in them and end in what follows. So
its detokeniser is made for the client's prompt alone and fed the beginning, whose text the client
has.

vLLM loads this module as a general plugin in each of its processes. It changes nothing for requests
whose transfer parameters, sealed by this cluster, do not name resumed tokens.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.channel import SECRET_ENV, SECRET_FILE_ENV
from splitserve.kv_transfer.transfer_params import resumed_tokens
from splitserve.orchestrator.engines.connector_config import cluster_secret

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

logger = logging.getLogger("vllm.splitserve.resumed_answers")


def install() -> None:
    """Detokenisers made in this process from now on can go on with an answer.

    Raises ``RuntimeError`` when this vLLM makes them otherwise; vLLM logs it and goes on without
    the plugin.
    """
    if not (os.environ.get(SECRET_ENV) or os.environ.get(SECRET_FILE_ENV)):
        return
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer

    for name in ("update", "get_next_output_text", "num_output_tokens"):
        if not callable(getattr(BaseIncrementalDetokenizer, name, None)):
            raise RuntimeError(f"this vLLM's detokeniser has no {name}")
    secret = cluster_secret()
    make = IncrementalDetokenizer.from_new_request

    def from_new_request(
        cls: type[IncrementalDetokenizer], tokenizer: Any, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        resumed = resumed_tokens(extra.get("kv_transfer_params"), secret)
        ids = request.prompt_token_ids
        if not resumed or tokenizer is None or ids is None or resumed >= len(ids):
            return make(tokenizer, request)
        begun = copy.copy(request)
        begun.prompt_token_ids = ids[:-resumed]
        detokenizer = make(tokenizer, begun)
        resume(detokenizer, ids[-resumed:])
        return detokenizer

    IncrementalDetokenizer.from_new_request = classmethod(from_new_request)


def resume(detokenizer: IncrementalDetokenizer, ids: list[int]) -> None:
    """The text of ``ids`` counts as generated here and sent, but for what is held back because a
    stop string may begin in it.
    """
    # The request's own minimum is what is left of it; here the tokens before count too.
    detokenizer.min_tokens += len(ids)
    for token in ids:
        detokenizer.update([token], False)
        detokenizer.get_next_output_text(False, True)

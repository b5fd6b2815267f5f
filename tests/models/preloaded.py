# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server from which worker processes are forked, so that none imports it again."""

import torch._dynamo
import torch.distributed.pipelining  # noqa: F401
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import holmes_core.runtime.engine  # noqa: F401
import tests.models.pipeline
import tests.models.zoo  # noqa: F401

"""Options of commands; a command's signature sets the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Argument, Option

from decant.client.channel import Tls
from decant.command.errors import CommandFailed

T = TypeVar("T")

Json = Annotated[bool, Option("--json", help="Print one JSON document instead.")]

# Which deployment
Address = Annotated[str | None, Option(help="host:port of routers, separated by commas; unset: those on this machine.")]
RedisUrl = Annotated[
    str | None, Option(help="Redis of the deployment; unset: of the one on this machine.", show_default=False)
]
Wait = Annotated[float, Option(min=0, help="Seconds to wait until a deployment on this machine has started.")]
Ca = Annotated[Path | None, Option(help="PEM roots of the server's certificate; turns TLS on.")]
Certificate = Annotated[Path | None, Option(help="PEM file with this client's certificate chain; needs --key.")]
Key = Annotated[Path | None, Option(help="PEM file with the key of --certificate.")]
ServerName = Annotated[str | None, Option(help="Name in the server's certificate, if it is not its address.")]

# generate
PromptText = Annotated[str | None, Argument(help="Text; '-' or none: standard input.")]
Chat = Annotated[bool, Option(help="Send PROMPT as a user's message, with the model's chat template.")]
Tools = Annotated[
    Path | None, Option(help="JSON file with a list of tools that the model may call; sends PROMPT as --chat does.")
]
ToolChoice = Annotated[
    str | None, Option(help="auto, none, required, or the name of a tool that the model has to call; with --tools.")
]
ModelId = Annotated[str | None, Option(help="Model id; unset: the server's default.")]
LoraName = Annotated[str | None, Option("--lora", help="Name of one of the model's adapters; unset: none.")]
MaxTokens = Annotated[int | None, Option(help="Maximum output tokens; unset: what the context length leaves.")]
MaxReasoningTokens = Annotated[int | None, Option(help="Maximum tokens of reasoning, whose end is forced then.")]
Reasoning = Annotated[bool | None, Option(help="Turn reasoning on or off, if the chat template has a switch for it.")]
MinTokens = Annotated[int | None, Option(help="Minimum output tokens before the output may end.")]
Temperature = Annotated[float | None, Option(help="Sampling temperature; 0 takes the most likely token.")]
TopP = Annotated[float | None, Option(help="Share of probability to draw from.")]
TopK = Annotated[int | None, Option(help="Number of most likely tokens to draw from; 0: all.")]
MinP = Annotated[float | None, Option(help="Minimum share of the most likely token's probability.")]
FrequencyPenalty = Annotated[float | None, Option(help="Penalty times a token's count in the output.")]
PresencePenalty = Annotated[float | None, Option(help="Penalty for a token that is in the output.")]
RepetitionPenalty = Annotated[float | None, Option(help="Penalty that counts prompt and output; 1 is off.")]
Seed = Annotated[int | None, Option(help="Seed of the draws: the same one gives the same tokens on CPUs of one kind.")]
Stop = Annotated[list[str] | None, Option(help="Text that ends the output; may be repeated.")]
StopTokenIds = Annotated[
    list[int] | None, Option("--stop-token-id", help="Token that ends the output; may be repeated.")
]
IgnoreEos = Annotated[bool | None, Option(help="Continue past the model's end of sequence.")]
ParseSpecialTokens = Annotated[
    bool | None, Option(help="Texts of special tokens are those tokens; unset: in a text, not in what --chat sends.")
]
JsonSchema = Annotated[Path | None, Option(help="File with a JSON schema that the output follows.")]
Regex = Annotated[str | None, Option(help="Regular expression that the whole output matches.")]
Grammar = Annotated[Path | None, Option("--grammar", help="File with a grammar that the output follows.")]
Choice = Annotated[list[str] | None, Option(help="Text that the output may be; may be repeated.")]
JsonObject = Annotated[bool | None, Option("--json-object", help="The output is a JSON object.")]
Logprobs = Annotated[int | None, Option(help="Logprobs with this many alternatives per token, in --json.")]
TokenIds = Annotated[bool | None, Option(help="Token ids, in --json.")]
Priority = Annotated[int | None, Option(help="Priority, -1000 to 1000; larger is more urgent.")]
RequestId = Annotated[str | None, Option(help="Id of the request; unset: generated.")]
Timeout = Annotated[float | None, Option(min=0, help="Seconds until the deadline of the request.")]
WaitForStart = Annotated[
    float | None,
    Option(
        min=0, help="Seconds to wait for a deployment; unset: 60 while one on this machine starts, 30 with --address."
    ),
]

# status
Watch = Annotated[bool, Option("--watch", help="Refresh every second, until Ctrl-C.")]

# drain
WorkerId = Annotated[str, Argument(metavar="WORKER", help="Id of the worker, as `decant status` shows it.")]
Undo = Annotated[bool, Option("--undo", help="Put a drained worker back into service.")]
DrainTimeout = Annotated[float, Option(min=0, help="Seconds to wait for the end of the worker's runs; 0: none.")]


# move
class NewRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


NewWorkerRole = Annotated[
    NewRole, Option("--role", help="Pool to which the worker belongs from now on.", show_default=False)
]

# add-adapter, remove-adapter
AdapterEntry = Annotated[
    str, Argument(metavar="NAME=FOLDER", help="Name for requests, and the adapter's folder on the workers' machines.")
]
AdapterName = Annotated[str, Argument(metavar="NAME", help="Name of the adapter.")]
WorkerIds = Annotated[
    list[str] | None,
    Option("--worker", help="Id of a worker; may be repeated. Unset: all workers.", show_default=False),
]

# scale-advice
AdviceSeconds = Annotated[float, Option(min=1, help="Seconds of load to look at.")]

# top
AdminAddresses = Annotated[
    list[str] | None,
    Argument(help="host:port of each admin port; none: those of the deployment on this machine.", show_default=False),
]
Once = Annotated[bool, Option("--once", help="Show one state, after one interval, and end.")]
Interval = Annotated[float, Option(min=0.1, help="Seconds between two readings.")]

# up
ModelSource = Annotated[
    str | None, Option(help="Folder, GGUF file or hub name of the model; unset: the packaged tiny-python model.")
]
Routers = Annotated[int, Option(min=1, help="Number of routers.")]
PrefillWorkers = Annotated[int, Option(min=0, help="Number of prefill workers.")]
DecodeWorkers = Annotated[int, Option(min=0, help="Number of decode workers.")]
Port = Annotated[
    int, Option(min=0, max=65535, help="Port of the first router, others get the next ones; 0: free ports.")
]
GatewayPort = Annotated[
    int | None, Option(min=0, max=65535, help="Serve OpenAI's API over HTTP on this port; 0: a free one.")
]
OpenAiPort = Annotated[
    int | None,
    Option(min=0, max=65535, help="Serve OpenAI's and Anthropic's APIs over HTTP on this port, by smg; 0: a free one."),
]
Host = Annotated[str, Option(help="Address on which routers listen; 0.0.0.0 or :: is every address.")]
RedisToUse = Annotated[str | None, Option(help="Redis to use; unset: a private one.")]
Dtype = Annotated[str, Option(help="Dtype of weights and KV cache: auto, bfloat16, float16 or float32.")]
KvMemory = Annotated[
    str | None, Option(help="Memory for the KV cache of each worker, such as 512M or 2G; unset: a share.")
]
Adapters = Annotated[
    list[str] | None,
    Option(help="LoRA adapter of the model for each worker, as NAME=FOLDER; may be repeated.", show_default=False),
]
AdapterMemory = Annotated[
    str | None,
    Option(
        help="Memory for adapters of each worker, such as 512M: the least recently used ones leave; unset: no limit.",
        show_default=False,
    ),
]
ReadySeconds = Annotated[float, Option(min=1, help="Seconds to wait until all processes are ready.")]
LogFormat = Annotated[
    str, Option(help="auto, json or console (columns); auto: progress and warnings on a terminal, JSON elsewhere.")
]

# bench and plan
Slo = Annotated[str, Option(help="Objectives, such as ttft=500ms,tpot=50ms.", show_default=False)]


def from_params(kind: type[T], params: Mapping[str, Any], **others: Any) -> T:
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: params[name] for name in names}, **others)


def tls_from(params: dict[str, Any]) -> Tls | None:
    files = {"ca": params["ca"], "certificate": params["certificate"], "key": params["key"]}
    name = params["server_name"]
    if not any(files.values()) and not name:
        return None
    if (files["certificate"] is None) != (files["key"] is None):
        raise CommandFailed("--certificate and --key come together", status=2)
    return Tls(**files, name=name)

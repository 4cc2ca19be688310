"""Stream a reply through the `anthropic` package (/v1/messages) from llama-dflash's server.

python examples/06_anthropic_client.py [TARGET.gguf DRAFT.gguf]
python examples/06_anthropic_client.py --url http://127.0.0.1:8080     (of `llama-dflash serve`; nothing is started)

The reply goes to stdout, mode and counts to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import llama_dflash
from llama_dflash import builds
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

try:
    from anthropic import Anthropic
except ImportError:
    sys.exit("this example needs the package anthropic: pip install anthropic")

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair; it knows code, not how to chat
QUESTION = "Write a function that reverses a list."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    parser.add_argument("--url", help="of a server that runs")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            config = RunConfig(args.target, args.draft, budget=15).checked()
            server = stack.enter_context(Server(builds.resolve(builds.INSTALLED), config, extra=["-c", "2048"]))
            print(f"[{server.client.effective_mode()['str']}]", file=sys.stderr)
            url = server.client.url
        # The package wants a key; the server does not, unless it was started with --api-key.
        client = stack.enter_context(Anthropic(base_url=url, api_key="none"))
        stream = client.messages.stream(
            model="any",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=64,
            extra_body={"temperature": 0},  # newer versions of the package have no argument for it
        )
        for event in stack.enter_context(stream):
            if event.type == "text":
                print(event.text, end="", flush=True)
            # llama.cpp's own field, in the event that ends the message.
            timings = getattr(event, "timings", None)
            if timings and "rounds" in timings:
                print(f"\n[{timings['predicted_n']} tokens in {timings['rounds']} rounds]", file=sys.stderr)
        print()


if __name__ == "__main__":
    main()

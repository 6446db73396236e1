"""Serve a model with its n-gram table on disk, ask it a question, and prove the answer right.

Writes a checkpoint with the real table layout of Qwen3.8-Flash-Next and a tiny random model (so the
words are noise), serves it with `rowstream serve`, asks through the OpenAI client, then loads the
same checkpoint with plain transformers, the table in memory, and compares the text. Run with `make
demo`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openai import OpenAI

QUESTION = "Where does a table live that is larger than memory?"
MAX_TOKENS = 48
START_TIMEOUT_S = 120


def run_cli(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rowstream", *arguments], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return dict(json.load(answer))


@contextlib.contextmanager
def server(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Run `rowstream serve` and yield its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rowstream", "serve", str(checkpoint), "--port", str(port)]
    command += ["--table-backend", "disk"]  # auto would map a table that fits into memory
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            try:
                health(url)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def resident_mib(pid: int | str) -> float:
    """Memory that a process holds, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no VmRSS")


def ask(url: str, model: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    )
    pieces = []
    for event in stream:
        piece = (event.choices[0].delta.content or "") if event.choices else ""
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


def resident_answer(checkpoint: Path) -> tuple[str, float]:
    """The same question to plain transformers, in a process of its own: text and MiB held."""
    run = subprocess.run(
        [sys.executable, __file__, "--resident", str(checkpoint)],
        check=True,
        capture_output=True,
        text=True,
    )
    answer = json.loads(run.stdout)
    return answer["text"], answer["mib"]


def print_resident_answer(checkpoint: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen4ExpForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.dumps({"text": text, "mib": resident_mib("self")}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo-checkpoint"))
    parser.add_argument("--table-gib", type=float, default=1.0)
    parser.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if arguments.resident is not None:
        print_resident_answer(arguments.resident)
        return 0
    checkpoint: Path = arguments.checkpoint
    if not (checkpoint / "config.json").exists():
        print(f"\n-- writing a checkpoint with a {arguments.table_gib:g} GiB table to {checkpoint}")
        run_cli("synth", str(checkpoint), "--table-gib", f"{arguments.table_gib:g}")
    print("\n-- what is in it")
    run_cli("inspect", str(checkpoint))

    print("\n-- serving it, the table stays on disk")
    with server(checkpoint) as (url, pid):
        before = health(url)["tables"][0]
        print(
            f"\n-- {QUESTION}\n   (random weights: the words are noise, but always the same noise)"
        )
        streamed = ask(url, checkpoint.name)
        after = health(url)["tables"][0]
        served_mib = resident_mib(pid)

    rows = after["rows"] - before["rows"]
    tokens = rows // 16
    wait_ms = (after["gather_s"] - before["gather_s"]) / tokens * 1e3
    print(
        f"\n-- rows read: {rows} for {tokens} tokens, in {after['reads'] - before['reads']} reads"
    )
    print(f"   wait for rows: {wait_ms:.2f} ms a token")
    print(
        f"   memory of the table: {after['memory_bytes'] / 2**20:.1f} MiB "
        f"of {after['table_bytes'] / 2**20:.0f} MiB ({after['backend']}, {after['reader']})"
    )

    print("\n-- the same question to plain transformers, the whole table in memory")
    resident, resident_held = resident_answer(checkpoint)
    print(resident)
    print(f"   process: {resident_held:.0f} MiB; the server from disk: {served_mib:.0f} MiB")
    if streamed != resident:
        print("\nDIFFERENT: the streamed table gave other text", file=sys.stderr)
        return 1
    print("\nidentical: the text is the same, character by character")
    return 0


if __name__ == "__main__":
    sys.exit(main())

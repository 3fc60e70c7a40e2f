"""An OpenAI-compatible HTTP server on loopback that answers with recorded verdicts, and fails on request.

    python tests/replay_server.py --verdicts v.jsonl --rate_limit 0.2 --error 0.1 --hang 0.1 --cut 0.1 --babble 0.1

A prompt with the recorded texts in the recorded order gets the recorded reply, in the other order the mirrored one.
The port is printed on the first line. GET /stats tells what was asked and how it failed, GET /log the hash of every
post in the order of the requests; GET /forget ends all waits that were asked for. Only the standard library.
"""

import argparse
import asyncio
import hashlib
import json
import random
import re
import time
from collections import Counter
from email.utils import formatdate

PROMPT = re.compile(r"Post:\n(.*)\n\nSummary A:\n(.*)\n\nSummary B:\n(.*)\n\nFIRST provide", re.DOTALL)
MIRROR = {"Summary A": "Summary B", "Summary B": "Summary A"}


def load_replies(path: str) -> dict[tuple[str, str, str], str]:
    """(post, summary A, summary B) -> reply, for both orders of every recorded verdict."""
    replies = {}
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        texts = {"reference": row["reference"].strip(), "response": row["response"].strip()}
        for shown_as in "AB":  # of the reference
            a, b = ("reference", "response") if shown_as == "A" else ("response", "reference")
            explanation = row["explanation"]
            if shown_as != row["reference_shown_as"]:
                explanation = re.sub(r"Summary [AB]", lambda match: MIRROR[match.group()], explanation)
            letter = "A" if a == row["preferred"] else "B"
            key = (row["query"].strip(), texts[a], texts[b])
            replies[key] = f"Comparison: {explanation}\nPreferred: {letter}"
    return replies


class Server:
    """Serves /v1/chat/completions; `faults` are probabilities, at most `max_faults` of them for one prompt."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.replies, self.random = args, load_replies(args.verdicts), random.Random(args.seed)
        self.stats, self.faults_of, self.not_before, self.in_flight, self.log = Counter(), Counter(), {}, 0, []
        self.revoked_at = 0.0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin1").split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = lines[0].split(" ", 2)
                reply = await self.respond(method, path, headers, body)
                if reply is None:  # cut in the middle of a body that was promised to be longer
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{")
                    await writer.drain()
                    break
                status, extra, content = reply
                payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                fields = {"content-type": "application/json", "content-length": len(payload)} | extra
                head = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode())
                size = 1 if self.args.trickle and method == "POST" else max(len(payload), 1)
                for start in range(0, len(payload), size):
                    writer.write(payload[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(self.args.trickle)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client closed the connection, or was killed
        finally:
            writer.close()

    async def respond(self, method: str, path: str, headers: dict, body: bytes):
        """(status, headers, JSON), or None to cut the connection."""
        if path == "/stats":
            return 200, {}, dict(self.stats)
        if path == "/log":
            return 200, {}, self.log
        if path == "/forget":  # a client that was killed does not know what it was told to wait
            self.not_before.clear()
            return 200, {}, {}
        if method != "POST" or path != "/v1/chat/completions":
            return 404, {}, error(f"no such path: {path}", "not_found")
        revoked = self.args.revoke_after and self.stats["requests"] >= self.args.revoke_after
        if revoked or self.args.key and headers.get("authorization") != f"Bearer {self.args.key}":
            self.stats["refused"] += 1
            if revoked:  # every request in flight hears of it in the same moment
                self.revoked_at = self.revoked_at or time.time()
                await asyncio.sleep(self.revoked_at + 0.5 - time.time())
            return 401, {}, error(f"Incorrect API key provided: {headers.get('authorization')}", "invalid_api_key")
        request = json.loads(body)
        if request["model"] != self.args.model:
            self.stats["refused"] += 1
            return 404, {}, error(f"The model `{request['model']}` does not exist", "model_not_found")
        self.stats["requests"] += 1
        self.in_flight += 1
        self.stats["max_in_flight"] = max(self.stats["max_in_flight"], self.in_flight)
        self.stats["streaming"] += bool(request.get("stream"))
        self.stats["warm"] += request.get("temperature") != 0
        self.stats["reminded"] += request["messages"][-1]["content"].endswith(
            'exactly "Preferred: A" or "Preferred: B".'
        )
        try:
            await asyncio.sleep(self.args.latency)
            return await self.answer(request["messages"][-1]["content"])
        finally:
            self.in_flight -= 1

    async def answer(self, prompt: str):
        match = PROMPT.search(prompt)
        key = tuple(part.strip() for part in match.groups()) if match else ("",)
        self.log.append(post_hash(key[0]))
        if self.args.body:
            return 200, {}, self.args.body
        if self.args.always:
            return 200, {}, completion(self.args.always, prompt)
        # came back before Retry-After was over, by more than clocks differ
        self.stats["early"] += time.time() < self.not_before.get(key, 0) - 0.01
        if key not in self.replies:
            return 400, {}, error("this prompt was not recorded", "unknown_prompt")
        draw = self.random.random()
        if self.faults_of[key] < self.args.max_faults:
            for fault in ("rate_limit", "error", "hang", "cut", "babble"):
                draw -= getattr(self.args, fault)
                if draw < 0:
                    self.stats[fault] += 1
                    self.faults_of[key] += 1
                    return await getattr(self, fault)(key)
        self.stats["answered"] += 1
        return 200, {}, completion(self.replies[key], prompt)

    async def rate_limit(self, key):
        seconds = self.random.choice([1, 2])
        self.not_before[key] = time.time() + seconds
        if self.random.random() < 0.5:
            return 429, {"retry-after": seconds}, error("rate limit reached", "rate_limit_exceeded")
        self.not_before[key] = int(time.time() + seconds)  # a date has whole seconds
        date = formatdate(self.not_before[key], usegmt=True)
        return 429, {"retry-after": date}, error("rate limit reached", "rate_limit_exceeded")

    async def error(self, key):
        return 500, {}, error("the server had an error", "server_error")

    async def hang(self, key):
        await asyncio.sleep(self.args.hang_seconds)
        return None

    async def cut(self, key):
        return None

    async def babble(self, key):
        self.faults_of[key] += self.args.max_faults  # one reply without a verdict is enough for a prompt
        return 200, {}, completion(self.random.choice(["", "Both are good.", 'Preferred: <"A" or "B">']), "")


def post_hash(post: str) -> str:
    return hashlib.sha256(post.strip().encode()).hexdigest()[:16]


def error(message: str, code: str) -> dict:
    return {"error": {"message": message, "type": "error", "code": code}}


def completion(text: str, prompt: str) -> dict:
    usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(text) // 4}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage["total_tokens"] = sum(usage.values())
    return {
        "id": "replay",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


async def serve(args: argparse.Namespace) -> None:
    server = await asyncio.start_server(Server(args).connection, "127.0.0.1", args.port, limit=2**20, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="replay")
    parser.add_argument("--key", default="", help="the only key that is let in; empty: any")
    parser.add_argument("--revoke_after", type=int, default=0, help="requests after which no key is let in any more")
    parser.add_argument("--always", default="", help="one reply to everything")
    parser.add_argument("--body", default="", help="one body, a completion or not, for everything")
    parser.add_argument("--trickle", type=float, default=0.0, help="seconds after each byte of a reply")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each reply")
    for name in ("rate_limit", "error", "hang", "cut", "babble"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="share of requests that fail so")
    parser.add_argument("--max_faults", type=int, default=5, help="faults for one prompt")
    parser.add_argument("--hang_seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))

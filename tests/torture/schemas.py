"""Answers that follow random JSON schemas, asked of a server over HTTP: every one is valid.

python -m tests.torture.schemas MODEL --count 300

The schemas nest objects, arrays, enumerations, patterns, bounds, alternatives and definitions; the judge is written by
what the JSON Schema specification says of these, and shares nothing with what makes the grammar.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strata.serving import Server, Service, ask

NAMES = ("name", "age", "city", "tags", "price", "is_open", "notes", "id", "parts", "kind", "größe", 'with "quotes"')
PATTERNS = (r"^[a-z]{2,6}$", r"^\d{3}-\d{4}$", r"^(red|green|blue)$", r"^[A-Z][a-z]*$")
PROMPTS = ("Describe a shop.", "Tell me about a person.", "List what is in a box.", "What is the weather?", "你好")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that has an answer which fits into a few hundred tokens."""
    simple = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "bounded"]
    kind = rng.choice(simple if depth >= 3 else [*simple, "object", "object", "object", "array", "array", "any_of"])
    match kind if depth else rng.choice(("object", "object", "array", "any_of", "defs")):
        case "object":
            names = rng.sample(NAMES, rng.randrange(1, 4))
            made: dict[str, Any] = {
                "type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names},
                "required": [n for n in names if rng.random() < 0.7], "additionalProperties": False,
            }  # fmt: skip
            return made
        case "array":
            low = rng.randrange(0, 3)
            bounds = {"minItems": low, "maxItems": low + rng.randrange(0, 3)}
            return {"type": "array", "items": random_schema(rng, depth + 1), **bounds}
        case "any_of":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
        case "defs":
            node = {"type": "object", "properties": {"value": random_schema(rng, 2), "next": {"anyOf": [
                {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"],
                "additionalProperties": False}  # fmt: skip
            return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
        case "enum":
            return {"enum": rng.sample(["a", "b", 'c"\\', 1, 2.5, True, None, "très long"], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice(["fixed", 7, None, ["x", 1], {"k": False}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "bounded":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 200)}
        case "string":
            return {"type": "string", "minLength": rng.randrange(0, 3), "maxLength": rng.randrange(3, 20)}
        case plain:
            return {"type": plain}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Whether a value fits a schema of the kinds above."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(is_valid(value, s, root) for s in schema["anyOf"])
    if "enum" in schema:
        return any(_same(value, v) for v in schema["enum"])
    if "const" in schema:
        return _same(value, schema["const"])
    match schema["type"]:
        case "object":
            if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
                return False
            return all(is_valid(v, schema["properties"][k], root) for k, v in value.items())
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(v, schema["items"], root) for v in value)
        case "string":
            if not isinstance(value, str) or not schema.get("minLength", 0) <= len(value) <= schema.get(
                "maxLength", 1 << 30
            ):
                return False
            return "pattern" not in schema or re.search(schema["pattern"], value) is not None
        case "integer":
            whole = value.is_integer() if isinstance(value, float) else type(value) is int
            return whole and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def wrong_answers(url: str, count: int, *, seed: int = 0, clients: int = 16, max_tokens: int = 160) -> list[str]:
    """Schemas whose answer is no JSON, or does not fit."""

    def one(number: int) -> str | None:
        rng = random.Random(seed * 1_000_003 + number)
        schema = random_schema(rng)
        body = {"messages": [{"role": "user", "content": rng.choice(PROMPTS)}], "max_tokens": max_tokens,
                "temperature": rng.choice((0, 0.7, 1.5)), "seed": number,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}  # fmt: skip
        found = ask(url, "/v1/chat/completions", body, timeout=900)
        try:
            text = found["choices"][0]["message"]["content"]
            good = is_valid(json.loads(text), schema)
        except (KeyError, ValueError) as error:
            return f"{number}: {schema}: {error!r} in {found}"
        return None if good else f"{number}: {schema}: {text}"

    with ThreadPoolExecutor(clients) as threads:
        return [told for told in threads.map(one, range(count)) if told is not None]


def main() -> int:
    from strata.models import load

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    start = time.perf_counter()
    with Server(Service(load(options.model, context=2048)), port=0) as server:
        told = wrong_answers(server.url, options.count, seed=options.seed, max_tokens=options.max_tokens)
    print("\n".join(told))
    print(f"{options.count - len(told)} of {options.count} answers are valid, {time.perf_counter() - start:.0f} s")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())

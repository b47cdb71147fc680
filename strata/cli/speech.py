"""`strata transcribe`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from strata.cli import show
from strata.cli.parser import Mistake
from strata.cli.text import load_model
from strata.config import using
from strata.core import progress
from strata.models import Segment, load_wav


def transcribe(options: Namespace) -> None:
    """What is said in sound files, with the times if they are asked for."""
    for path in options.files:
        if not Path(path).is_file():
            raise Mistake(f"transcribe: there is no file {path}")
    model = load_model(options.model, "transcribe", options.device)
    found = []
    with using(**({"num_threads": options.threads} if options.threads else {})):
        for path in options.files:
            start = time.perf_counter()
            samples, rate = load_wav(path)
            done = 0
            with progress("seconds of sound", len(samples) // rate) as advance:

                def told(now: float, _: float) -> None:
                    nonlocal done
                    advance(int(now) - done)
                    done = int(now)

                made = model.transcribe(
                    samples, rate=rate, language=options.language, beams=options.beams, progress=told,
                    task="translate" if options.translate else "transcribe",
                )  # fmt: skip
            found.append((path, made, time.perf_counter() - start))
            if options.json:
                continue
            if options.srt:
                print(srt(made.segments), end="")
            elif options.timestamps:
                for s in made.segments:
                    print(f"[{clock(s.start)} - {clock(s.end)}]  {s.text.strip()}")
            else:
                print(made.text)
    if options.json:
        show.as_json([
            {
                "file": path, "text": made.text, "language": made.language, "seconds": seconds,
                "segments": [{"start": s.start, "end": s.end, "text": s.text} for s in made.segments],
            } for path, made, seconds in found
        ])  # fmt: skip


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds // 60):02}:{seconds % 60:05.2f}"


def srt(segments: Iterable[Segment]) -> str:
    """Segments as subtitles, in the SubRip format."""
    rows = []
    for number, s in enumerate((s for s in segments if s.text.strip()), 1):
        times = " --> ".join(
            f"{int(t // 3600):02}:{int(t // 60) % 60:02}:{int(t) % 60:02},{round(t * 1000) % 1000:03}"
            for t in (s.start, s.end)
        )
        rows.append(f"{number}\n{times}\n{s.text.strip()}\n\n")
    return "".join(rows)

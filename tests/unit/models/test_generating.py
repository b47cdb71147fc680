"""Ways of generating: filters against plain loops, samples of one prompt, beams against all texts, prompts on disk."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError, OptionError
from strata.models import Decoder, Sampler, load
from strata.models.decoders import MODULES
from strata.models.generating.continuations import best_beams, samples
from strata.models.generating.filters import (
    SampleStream,
    dry_penalties,
    heaviest,
    repetition_lengths,
    typical,
    without_top,
)
from strata.serving import Engine
from tests.unit.models.random_models import random_model
from tests.unit.models.test_decoder_vectors import folder

PROMPT = [5, 9, 31, 7, 12]


class Letters:
    """A tokenizer of single letters."""

    eos, bos, template = (), None, None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(c) % 48 for c in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(48 + i) for i in ids)


def model(path: Path, name: str = "llama", **options: Any) -> Decoder:
    made: Decoder = load(folder(path, name), **options)
    made._tokenizer = Letters()  # type: ignore[assignment]
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return model(tmp_path_factory.mktemp("models") / "llama", context=40)


def test_typical_tokens(rng: np.random.Generator) -> None:
    for mass in (0.2, 0.7, 0.95):
        weights = rng.random(20) ** 4 + 1e-9
        shares = weights / weights.sum()
        distance = np.abs(-np.log(shares) + (shares * np.log(shares)).sum())
        wanted, total = set(), 0.0
        for i in np.argsort(distance):
            wanted.add(int(i))
            total += shares[i]
            if total >= mass:
                break
        assert set(np.flatnonzero(typical(weights, mass)).tolist()) == wanted


def test_xtc_leaves_the_least_likely_of_the_likely() -> None:
    keep = without_top(np.array([5.0, 1.0, 3.0, 0.5, 0.5]), 0.1)
    assert keep.tolist() == [False, True, False, True, True]
    assert without_top(np.array([9.0, 0.5, 0.5]), 0.1).all()
    hot = dict(temperature=1.0, xtc_threshold=0.2)
    logits = np.log(np.array([0.5, 0.3, 0.2 - 1e-3, 1e-3], np.float32))
    always, never = (Sampler(xtc_probability=p, seed=1, **hot) for p in (1.0, 0.0))  # type: ignore[arg-type]
    numbers = always.stream()
    assert 0 not in {always.choose(logits, [], numbers) for _ in range(50)}
    assert 0 in {never.choose(logits, [], numbers) for _ in range(50)}


def test_xtc_against_its_definition(rng: np.random.Generator) -> None:
    """From the likeliest token on, all that reach the threshold go but the last of them."""
    for _ in range(200):
        weights, threshold = rng.dirichlet(np.full(12, 0.3)), rng.uniform(0.01, 0.5)
        order = np.argsort(-weights)
        count = int((weights >= threshold).sum())
        gone = order[: count - 1] if count > 1 else []
        assert set(np.flatnonzero(~without_top(weights * 7, threshold))) == set(gone)


def test_dry_against_a_plain_search(rng: np.random.Generator) -> None:
    for _ in range(200):
        tokens = rng.integers(0, 4, rng.integers(1, 24)).tolist()
        breakers = [3] if rng.random() < 0.5 else []
        wanted: dict[int, int] = {}
        for end in range(1, len(tokens)):  # what came before `end` repeats what the sequence ends with
            n = 0
            while n < end and tokens[end - 1 - n] == tokens[-1 - n] and tokens[-1 - n] not in breakers:
                n += 1
            if n and tokens[end] not in breakers:
                wanted[tokens[end]] = max(n, wanted.get(tokens[end], 0))
        assert repetition_lengths(tokens, breakers) == wanted
    assert dry_penalties([1, 2, 3, 1, 2], 0.5, 2.0, 2, ()) == {3: 0.5}
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 2, ()) == {4: 1.0}
    dry = Sampler(dry_multiplier=50.0)
    assert dry.choose(np.array([0, 0, 0, 9, 1.0], np.float32), [1, 2, 3, 1, 2], dry.stream()) == 4


def test_penalties_of_long_repetitions_are_numbers() -> None:
    dry = Sampler(dry_multiplier=2.0, dry_base=1e6)
    found = dry.penalised(np.zeros(4, np.float32), [1, 2] * 200)
    assert np.isfinite(found).all()
    assert found[1] < -1e38
    everything = Sampler(dry_multiplier=1e6, dry_base=1e6, dry_allowed_length=1)
    assert everything.choose(np.arange(2, dtype=np.float32), [0, 1] * 200 + [1, 0, 0] * 200, everything.stream()) < 2


def test_mirostat_against_its_definition(rng: np.random.Generator) -> None:
    """Tokens above a surprise go; the surprise of the one that is drawn from the rest moves the bound."""
    tau, eta = 3.0, 0.2
    sampler = Sampler(temperature=0.8, mirostat_tau=tau, mirostat_eta=eta, seed=3)
    stream, same, bound = sampler.stream(), sampler.stream(), 2 * tau
    for _ in range(300):
        logits = rng.normal(0, 3, 64).astype(np.float32)
        shares = np.exp(logits.astype(np.float64) / 0.8)
        shares /= shares.sum()
        kept = (-np.log2(shares) <= bound) | (shares == shares.max())
        left = np.where(kept, shares, 0) / shares[kept].sum()
        wanted = int(np.searchsorted(np.cumsum(left), same.random(), side="right"))
        assert sampler.choose(logits, [], stream) == wanted
        bound -= eta * (-np.log2(left[wanted]) - tau)
        assert isinstance(stream, SampleStream)
        assert stream.surprise == pytest.approx(bound, rel=1e-9)


def test_mirostat_keeps_the_surprise(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 3, 400).astype(np.float32)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    for tau in (1.5, 4.0):
        sampler = Sampler(temperature=1.0, mirostat_tau=tau, seed=0)
        numbers, bits = sampler.stream(), []
        for _ in range(600):
            limit = 2 * tau if numbers.surprise is None else numbers.surprise
            left = shares * ((-np.log2(shares) <= limit) | (shares == shares.max()))
            bits.append(-np.log2(left[sampler.choose(logits, [], numbers)] / left.sum()))
        assert abs(float(np.mean(bits[200:])) - tau) < 0.2


def test_filters_follow_each_other_as_documented(rng: np.random.Generator) -> None:
    """`min_p` is a share of the largest probability, and `top_p` of what `top_k` leaves: neither changes the other."""
    for _ in range(50):
        logits = rng.normal(0, 3, 30).astype(np.float32)
        heat, count, share, least = rng.uniform(0.3, 2), int(rng.integers(1, 31)), rng.uniform(0.2, 1), rng.random() / 4
        order = np.argsort(-logits)[:count]
        chances = np.exp(logits[order].astype(np.float64) / heat)
        chances /= chances.sum()
        kept = [i for i, p in enumerate(chances) if chances[:i].sum() < share and p >= least * chances[0]]
        wanted = np.zeros(30)
        wanted[order[kept]] = chances[kept] / chances[kept].sum()
        sampler = Sampler(temperature=heat, top_k=count, top_p=share, min_p=least)
        assert np.abs(sampler.probabilities(logits, []) - wanted).max() < 1e-9


def test_top_p_is_that_of_a_stable_sort(rng: np.random.Generator) -> None:
    """The same tokens, whatever is equal, zero, or as large as all others together."""
    for _ in range(600):
        count = int(rng.integers(1, 400))
        weights = np.exp(rng.normal(0, rng.choice([0.01, 1, 20]), count))
        if rng.random() < 0.6:  # equal ones
            weights = rng.choice(weights[: max(count // 9, 1)], count)
        weights[rng.random(count) < rng.choice([0, 0.5, 0.99])] = 0
        weights[rng.integers(count)] = rng.choice([1.0, 1e9])
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order])
        exact = running[rng.integers(count)] / running[-1]
        for mass in (1e-300, rng.random(), exact, np.nextafter(exact, 2), np.nextafter(1, 0), 1.0):
            wanted = np.sort(order[: int(np.searchsorted(running, mass * running[-1])) + 1])
            assert heaviest(weights, mass).tolist() == wanted.tolist()


def test_no_token_is_sorted_for_top_p(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stable sort of a vocabulary takes several times as long as all else that is done for a token."""
    monkeypatch.setattr(np, "argsort", None)
    logits = rng.normal(size=49_152).astype(np.float32)
    sampler = Sampler(temperature=0.7, top_p=0.9)
    assert logits[sampler.choose(logits, [], sampler.stream())] > -2


@pytest.mark.parametrize("sampling", [dict(frequency_penalty=1.5), dict(presence_penalty=2.0)])
def test_prompts_are_not_counted(sampling: dict[str, Any], llama: Decoder) -> None:
    """Penalties of what was generated are the same alone, in a batch and with drafts."""
    prompt = PROMPT * 3
    alone = llama.generate(prompt, max_tokens=12, **sampling)
    assert llama.generate_many([prompt, PROMPT], max_tokens=12, **sampling)[0] == alone
    assert llama.generate(prompt, max_tokens=12, draft=llama, **sampling) == alone


def test_runs_that_do_not_come_twice(llama: Decoder) -> None:
    tokens = list(llama.tokens(PROMPT, 30, Sampler(no_repeat_ngram_size=2)))
    pairs = list(itertools.pairwise([*PROMPT, *tokens]))
    assert len(set(pairs)) == len(pairs)
    assert len(set(itertools.pairwise([*PROMPT, *llama.tokens(PROMPT, 30, Sampler())]))) < len(pairs)


BEAMS: tuple[dict[str, Any], ...] = (
    dict(), dict(length_penalty=-1.0), dict(length_penalty=2.0, early_stopping=True), dict(early_stopping="never"),
    dict(repetition_penalty=1.7), dict(no_repeat_ngram_size=2, length_penalty=0.5),
    dict(suppress_tokens=[*range(3, 60)], begin_suppress_tokens=[*range(60, 100)]),
    dict(bad_words_ids=[[i, j] for i in range(3, 50) for j in range(40)] + [[100], [12, 101]]),
)  # fmt: skip


@pytest.mark.parametrize("options", BEAMS, ids=str)
def test_beams_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    reference = random_model(tmp_path, "llama")
    ours = load(tmp_path, context=64)
    import torch

    texts = reference.generate(
        torch.tensor([PROMPT]), num_beams=4, num_return_sequences=3, max_new_tokens=20, do_sample=False,
        eos_token_id=(end := _common(ours)), pad_token_id=0, **options,
    )  # fmt: skip
    wanted = []
    for row in texts[:, len(PROMPT) :].tolist():
        wanted.append(row[: row.index(end)] if end in row else row)
    fields = {f.name for f in dataclasses.fields(Sampler)} & set(options)
    options = dict(options)
    sampler = Sampler(**{name: options.pop(name) for name in fields})
    assert best_beams(ours, PROMPT, 4, 20, ends=(end,), sampler=sampler, **options)[:3] == wanted


def _common(model: Decoder) -> int:
    """A token that greedy texts have."""
    return list(model.tokens(PROMPT, 8, Sampler()))[6]


def test_samples_of_one_prompt(llama: Decoder) -> None:
    hot = dict(max_tokens=10, temperature=1.3, top_k=20, seed=5)
    texts = llama.generate(PROMPT, n=3, **hot)
    assert texts[0] == llama.generate(PROMPT, **hot)
    assert len(set(texts)) == 3
    assert texts == llama.generate(PROMPT, n=3, **hot)
    assert llama.generate(PROMPT, n=2, max_tokens=6) == [llama.generate(PROMPT, max_tokens=6)] * 2
    end = list(llama.tokens(PROMPT, 8, Sampler()))[4]
    rows = samples(llama, PROMPT, 2, 8, Sampler(), (end,))
    assert rows[0] == rows[1] == list(llama.tokens(PROMPT, 8, Sampler(), (end,)))


def test_beams_find_the_best_text(llama: Decoder) -> None:
    vocab = llama.config.vocab
    first = _logs(llama.run(input_ids=[PROMPT])["logits"][0, -1])
    texts = [[*PROMPT, i] for i in range(vocab)]
    second = _logs(llama.run(input_ids=texts)["logits"][:, -1])
    i, j = np.unravel_index((first[:, None] + second).argmax(), (vocab, vocab))
    assert best_beams(llama, PROMPT, vocab, 2)[0] == [i, j]
    assert best_beams(llama, PROMPT, 1, 6)[0] == list(llama.tokens(PROMPT, 6, Sampler()))
    assert llama.generate(PROMPT, beams=vocab, max_tokens=2) == Letters().decode([int(i), int(j)])


@pytest.mark.parametrize(("name", "alpha"), [("llama", 0.3), ("llama", 0.9), ("mamba2", 0.6)])
def test_contrastive_search_against_a_loop(name: str, alpha: float, tmp_path: Path) -> None:
    """Each candidate is run with its whole text, and no cache; hidden states are compared one by one."""
    made = model(tmp_path / "model", name, context=40)
    ids, wanted = list(PROMPT), []

    def read(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        rows, hidden = made.step_with_hidden(made.start(), np.array([tokens], np.int32), every=True)
        return rows[0], hidden[0].astype(np.float64)

    for _ in range(9):
        shares = np.exp(_logs(read(ids)[0][-1]))
        best = (-np.inf, -1)
        for token in np.argsort(-shares)[:5]:
            hidden = read([*ids, int(token)])[1]
            same = max(h @ hidden[-1] / np.linalg.norm(h) / np.linalg.norm(hidden[-1]) for h in hidden[:-1])
            best = max(best, ((1 - alpha) * shares[token] - alpha * same, int(token)))
        ids.append(best[1])
        wanted.append(best[1])
    options: dict[str, Any] = dict(max_tokens=9, penalty_alpha=alpha, top_k=5)
    assert made.generate(PROMPT, **options) == Letters().decode(wanted)
    assert "".join(made.generate(PROMPT, stream=True, **options)) == Letters().decode(wanted)
    assert wanted != list(made.tokens(PROMPT, 9, Sampler())) or alpha < 0.5
    long = made.generate(PROMPT, max_tokens=100, penalty_alpha=alpha, top_k=3)
    assert len(long) == made.context - len(PROMPT) + 1  # the context ends it


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    """The last hidden states, behind the last norm, which contrastive search compares."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    from tests.unit.models.random_models import random_model

    reference = random_model(tmp_path, "gemma2")
    made: Decoder = load(tmp_path, context=40)
    ids = np.array([PROMPT], np.int32)
    with torch.no_grad():
        wanted = reference(torch.tensor(ids).long(), output_hidden_states=True).hidden_states[-1].numpy()
    found = made.step_with_hidden(made.start(), ids, every=True)[1]
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


def _logs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_prompts_are_kept_on_disk(name: str, tmp_path: Path) -> None:
    made, file = model(tmp_path / "model", name, context=40), tmp_path / "prompt.safetensors"
    text = made.generate(PROMPT, max_tokens=8)
    assert made.generate(PROMPT, max_tokens=8, prompt_cache=file) == text
    read: list[int] = []
    step = made.step
    made.step = lambda state, ids, **more: read.append(ids.shape[1]) or step(state, ids, **more)  # type: ignore[assignment,func-returns-value,method-assign]
    assert made.generate(PROMPT, max_tokens=8, prompt_cache=file) == text
    assert read[0] == 1
    assert sum(read) == 8
    read.clear()
    longer = [*PROMPT, 3, 4]
    assert made.generate(longer, max_tokens=4, prompt_cache=file) == made.generate(longer, max_tokens=4)
    assert read[:2] == [2, 1]
    other = model(tmp_path / "other", "qwen2", context=40)
    with pytest.raises(FileError, match="a prompt of another model"):
        other.generate(PROMPT, prompt_cache=file)


def test_a_shifted_context_goes_on(llama: Decoder) -> None:
    tokens = list(llama.tokens(PROMPT, 60, Sampler(), context_shift=True))
    assert len(tokens) == 60
    ends = llama.context - len(PROMPT) + 1
    assert tokens[:ends] == list(llama.tokens(PROMPT, 60, Sampler()))
    before = [*PROMPT, *tokens[:ends]][-llama.context // 2 :]
    assert tokens[ends : ends + 10] == list(llama.tokens(before, 10, Sampler()))


@pytest.mark.parametrize("name", ["jamba", "deepseek_v3"])
def test_served_requests_give_what_they_give_alone(name: str, tmp_path: Path) -> None:
    made = model(tmp_path / "model", name, context=48)
    engine = Engine(made, cache_tokens=160)  # so few that requests are preempted
    prompts = [PROMPT, [7, 8], list(range(3, 22)), PROMPT]
    found = [engine.submit(ids, max_tokens=12) for ids in prompts]
    engine.run()
    assert [g.text() for g in found] == [made.generate(ids, max_tokens=12) for ids in prompts]


def test_drafts_need_a_past_to_go_back_to(tmp_path: Path, llama: Decoder) -> None:
    with pytest.raises(OptionError, match="recurrent state takes no drafts"):
        model(tmp_path / "model", "mamba2", context=40).generate(PROMPT, draft=llama)
    with pytest.raises(OptionError, match="take no drafts"):
        llama.generate(PROMPT, draft=llama, temperature=1.0, mirostat_tau=2.0)


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/models.md").read_text("utf-8")
    assert [kind for kind in MODULES if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("cutoff", [0.003, 0.05, 0.4])
def test_cutoffs(cutoff: float, rng: np.random.Generator) -> None:
    for spread in (0.2, 1.0, 4.0):
        logits = (rng.standard_normal(40) * spread).astype(np.float32)
        shares = np.exp(logits.astype(np.float64))
        shares /= shares.sum()
        entropy = -(shares * np.log(shares)).sum()
        for name, least in (
            ("epsilon_cutoff", cutoff), ("eta_cutoff", min(cutoff, np.sqrt(cutoff) * np.exp(-entropy)))
        ):  # fmt: skip
            sampler = Sampler(temperature=1.0, **{name: cutoff})  # type: ignore[arg-type]
            kept = np.where((shares >= least) | (shares == shares.max()), shares, 0)
            np.testing.assert_allclose(sampler.probabilities(logits, []), kept / kept.sum(), atol=1e-9)
            assert not sampler.is_simple


def test_options_that_do_not_fit(llama: Decoder) -> None:
    with pytest.raises(OptionError, match="no option 'typical'; did you mean 'typical_p'"):
        llama.generate(PROMPT, typical=0.3)
    for options, match in (
        (dict(n=4, beams=3), "3 beams do not give n=4"), (dict(n=2, stream=True), "only one text at a time"),
        (dict(n=2, beams=3, draft=llama), "n does not go with draft"),
        (dict(beams=2, early_stopping="soon"), "early_stopping is True, False or 'never', got 'soon'"),
        (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size -1 is negative"),
        (dict(beams=2, temperature=1.0), "draws no tokens"), (dict(typical_p=0.0), "typical_p"),
        (dict(beams=2, length_penalty=1e4), "length_penalty 10000.0 is not within"),
        (dict(beams=2, length_penalty=float("nan")), "length_penalty nan is not within"),
        (dict(beams=10**30), "4096 is the most"), (dict(n=10**30, temperature=1.0), "4096 is the most"),
        (dict(epsilon_cutoff=1.0), "epsilon_cutoff 1.0 is not"), (dict(eta_cutoff=-0.1), "eta_cutoff -0.1 is not"),
        (dict(seed=-1), "seed -1 is negative"), (dict(max_tokens=-1), "max_tokens -1 is negative"),
        (dict(n=0), "n is at least 1"), (dict(beams=0), "0 beams"), (dict(penalty_alpha=0.6), "top_k 0 is below 2"),
        (dict(penalty_alpha=2.0, top_k=4), "penalty_alpha 2.0 is not"), (dict(penalty_alpha=0.6, n=2), "n does not go"),
        (dict(penalty_alpha=0.6, top_k=4, temperature=1.0), "draws no tokens"),
        (dict(penalty_alpha=0.6, context_shift=True), "penalty_alpha does not go with context_shift"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=match):
            llama.generate(PROMPT, **options)  # type: ignore[arg-type]


def test_tokens_that_do_not_come(llama: Decoder) -> None:
    plain = list(llama.tokens(PROMPT, 12, Sampler()))

    def made(**options: Any) -> list[int]:
        return list(llama.tokens(PROMPT, 12, Sampler(**options), (plain[3], plain[0])))

    assert not set(llama.tokens(PROMPT, 12, Sampler(suppress_tokens=plain))) & set(plain)
    late = list(llama.tokens(PROMPT, 12, Sampler(begin_suppress_tokens=plain)))
    assert late[0] not in plain
    assert list(llama.tokens([*PROMPT, late[0]], 11, Sampler())) == late[1:]
    for words in ([plain[1:3]], [[PROMPT[-1], plain[0]]], [[plain[2]]], [[*PROMPT, *plain[:2]]]):
        found = [*PROMPT, *llama.tokens(PROMPT, 12, Sampler(bad_words_ids=words))]
        assert found != [*PROMPT, *plain]
        assert not any(found[i : i + len(words[0])] == words[0] for i in range(len(found)))
    assert made() == []
    ends = (plain[3], plain[0])
    found = made(min_tokens=7, ends=ends)
    assert len(found) >= 7
    assert not set(found) & set(ends)


def test_the_ends_of_the_tokenizer_come_late(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(llama.tokens(PROMPT, 6, Sampler()))
    monkeypatch.setattr(llama.tokenizer, "eos", (plain[0],), raising=False)
    assert llama.generate(PROMPT, max_tokens=9) == ""
    assert len(llama.generate(PROMPT, max_tokens=9, min_tokens=9)) == 9
    assert llama.generate_many([PROMPT], max_tokens=9, min_tokens=9) == [
        llama.generate(PROMPT, max_tokens=9, min_tokens=9)
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(min_tokens=-1), "min_tokens -1 is negative"),
        (dict(min_tokens=9, max_tokens=5), "min_tokens 9 is more than max_tokens 5"),
        (dict(suppress_tokens=[-1]), "suppress_tokens has a negative token"),
        (dict(begin_suppress_tokens="ab"), "begin_suppress_tokens is a sequence of whole numbers"),
        (dict(bad_words_ids=[3]), "bad_words_ids is a sequence of"),
        (dict(bad_words_ids=[[]]), "an empty or a negative one"),
        (dict(bad_words_ids=[[3, -1]]), "an empty or a negative one"),
    ],
)
def test_tokens_that_are_none(options: dict[str, Any], told: str, llama: Decoder) -> None:
    with pytest.raises(OptionError, match=told):
        llama.generate(PROMPT, **options)


def test_logit_biases_and_stops(llama: Decoder) -> None:
    plain = llama.generate(PROMPT, max_tokens=6)
    token = next(iter(llama.tokens(PROMPT, 1, Sampler())))
    assert llama.generate(PROMPT, max_tokens=6, logit_bias={token: -100.0})[0] != plain[0]
    assert llama.generate(PROMPT, max_tokens=6, stop=[plain[2]]) == plain[: plain.index(plain[2])]
    assert len(list(itertools.islice(llama.generate(PROMPT, max_tokens=6, stream=True), 10))) > 0

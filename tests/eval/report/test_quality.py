"""Reports as JSON, Markdown and HTML. Plain dicts in, text out: no model, no tokenizer, no network."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attention.errors import Failure
from eval.report import quality as reports

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>"


def a_model(name: str, kind: str, method: str | None, kv_bytes: int, loss: float) -> dict[str, Any]:
    return {
        "name": name, "path": f"/models/{name}", "kind": kind, "method": method, "calibration_hash": None, "tokens": 12288,
        "perplexity": 30.1 * math.exp(loss), "loss_nats": loss, "bits_per_byte": 1.23 + loss / 3, "kl_to_source": 0.9 * loss,
        "top1_agreement": math.exp(-loss), "acceptance": math.exp(-loss), "cache_dtype": "bfloat16", "cache_format": None,
        "kv_bytes_per_token": kv_bytes, "kv_bytes_measured": float(kv_bytes), "cache_ratio": kv_bytes / 24576,
    }  # fmt: skip


def a_report(count: int) -> dict[str, Any]:
    """A source and `count - 1` conversions that crowd into one corner of the chart."""
    source = a_model("llama", "MHA", None, 24576, 0.0)
    methods = ["mean", "aligned", "weighted"]
    others = [
        a_model(f"llama-{i}", f"MLA-{512 - i}+64", methods[i % 3], 12288 - 128 * i, 0.2 + 0.001 * i) for i in range(count - 1)
    ]
    protocol = {
        "name": "paper", "context": 512, "stride": 512, "bos": "start", "dtype": "float32", "text": "held-out.txt",
        "text_hash": "sha256:9f86d081884c7d659a2feaa0c55ad015", "tokens_in_text": 12345, "bytes_in_text": 40000,
    }  # fmt: skip
    return {"kvfold": "0.1.0", "protocol": protocol, "models": [source, *others]}


def parsed(html: str) -> ElementTree.Element:
    """A page, which is well-formed."""
    return ElementTree.fromstring(html.removeprefix("<!doctype html>"))


def cells(html: str) -> list[str | None]:
    return [element.text for element in parsed(html).iter() if element.tag in ("th", "td")]


def labels(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def table_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their plots, which take nearly all of the time, but for tests with `html` in their names."""
    if "html" not in request.function.__name__:
        monkeypatch.setattr("eval.report.quality.to_svg", lambda models: "<svg></svg>")


def test_a_large_loss_is_said_in_words() -> None:
    report = a_report(3)
    assert "large loss" not in reports.to_markdown(report)
    report["models"][1]["loss_nats"], report["models"][2]["loss_nats"] = 0.9, 0.3
    said = "llama-0 +0.9000 nats (perplexity × 2.5: expect text that is hardly of use); "
    said += "llama-1 +0.3000 nats (perplexity × 1.3: expect worse text). "
    said += "A larger cache loses less; healing (convert heal) makes up for a part."
    for page in (reports.to_markdown(report), reports.to_html(report)):
        assert f"Warning: large loss: {said}" in page
    report["models"][1]["loss_nats"] = 1e4
    assert "perplexity × 1e+304" in reports.to_markdown(report)


WARNED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"calibration_overlap": 0.25}, {"calibration_overlap": 0.009}, "was fitted to text that holds 25 % of this one"),
    (
        {"calibration_context": 256},
        {"calibration_context": 1024},
        "llama-0 was calibrated for contexts of 256 tokens, and is evaluated on 1,024",
    ),
    ({"remarks": ["was made from another"]}, {"remarks": []}, "Warning: llama-0 was made from another."),
    ({"code": "its code is old"}, {"code": None}, "Warning: of llama-0, its code is old."),
    ({"kv_context": 2048}, {}, "KV bytes per token, and shares of them, are those of 2,048 tokens"),
]


@pytest.mark.parametrize(("changes", "without", "said"), WARNED, ids=[next(iter(one)) for one, *_ in WARNED])
def test_what_to_know_of_the_figures_is_said(changes: dict[str, Any], without: dict[str, Any], said: str) -> None:
    report = with_probes(a_report(2))  # whose longest context is 1,024
    report["models"][1] |= without
    assert said not in reports.to_markdown(report)
    report["models"][1] |= changes
    assert all(said in page for page in (reports.to_markdown(report), reports.to_html(report)))


def test_a_number_that_is_not_finite_is_named_and_leaves_what_was_written(tmp_path: Path) -> None:
    report, directory = with_probes(a_report(3)), tmp_path / "deep" / "report"
    reports.write(a_report(2), directory)
    reports.write(report, directory)  # over an older one
    paths = {name: directory / name for name in ("report.json", "report.md", "report.html")}
    assert sorted(directory.iterdir()) == sorted(paths.values())
    before = {path: path.read_bytes() for path in paths.values()}
    assert json.loads(before[paths["report.json"]]) == report
    assert list(json.loads(before[paths["report.json"]])) == list(report)
    assert before[paths["report.md"]].decode() == reports.to_markdown(report)
    assert before[paths["report.html"]].decode() == reports.to_html(report)
    bad: list[tuple[dict[str, Any], str, str]] = [
        (report["models"][1], "kl_to_source", 'kl_to_source of model "llama-0" is nan'),
        (report["protocol"], "stride", "stride of the protocol is nan"),
        (report["probes"][1]["found"][0], "nats", "probes of the report"),
    ]
    for owner, key, said in bad:
        owner[key], held = math.nan, owner[key]
        with pytest.raises(Failure, match=said):
            reports.write(report, directory)
        owner[key] = held
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_markdown_has_a_row_per_model_and_pipes_line_up() -> None:
    report = a_report(7)
    report["models"][1]["name"] = "模型"  # two terminal columns a character
    markdown = reports.to_markdown(report)
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7
    pipes = {tuple(i for i, c in enumerate(line.replace("模型", "....")) if c == "|") for line in table}
    assert len(pipes) == 1
    header, rule, source, first = table_of(markdown)[:4]
    assert dict(zip(header, rule, strict=True))["perplexity"].endswith("-:")
    assert not dict(zip(header, rule, strict=True))["model"].endswith(":")
    shown = "llama (source)|MHA|-|24,576|100.00 %|30.10|0.0000|1.230|0.0000|100.0 %|100.0 %"
    assert source == shown.split("|")
    assert first[3:7] == ["12,288", "50.00 %", "36.76", "+0.2000"]
    alone = a_report(1)
    alone["models"].append(alone["models"][0] | {"name": "llama (int8 cache)", "cache_format": "int8"})
    assert "(source)" not in reports.to_markdown(alone), "nothing is compared with it"
    assert markdown.splitlines()[-1] == (
        "Protocol paper: context 512, stride 512, BOS start, float32; text held-out.txt, 12,288 tokens scored, "
        "sha256:9f86d081884c."
    )


def test_figures_keep_their_digits() -> None:
    report = a_report(2)
    report["models"][1].update(kl_to_source=1e-6, loss_nats=-1e-9)
    row = table_of(reports.to_markdown(report))[3]
    assert (row[8], row[6]) == (r"\<0.0001", "0.0000"), "nearly exact does not look exact, and no zero has a sign"
    values = {5.4721: "5.472", 30.123: "30.12", 412.56: "412.6", 8103.4: "8,103", 123456.7: "123,457", 3.21e7: "3.2e+07"}
    for value, shown in values.items():
        report["models"][1]["perplexity"] = value
        assert table_of(reports.to_markdown(report))[3][5] == shown


@pytest.mark.parametrize("count", [1, 12])
def test_html_is_one_well_formed_page_with_a_plot(count: int) -> None:
    report = a_report(count)
    text = reports.to_html(report)
    page = parsed(text)
    assert page.attrib == {"lang": "en"}
    assert [element.attrib["scope"] for element in page.iter("th")] == ["col"] * len(reports.COLUMNS) + ["row"] * count
    ids = [element.attrib["id"] for element in page.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#(\w+)\)", text)) | set(re.findall(r'href="#(\w+)"', text))
    assert used <= set(ids)
    (svg,) = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert {"MHA", "source", *(m["kind"] for m in report["models"][1:])} <= set(labels(svg))


def test_both_pages_show_the_same_cells() -> None:
    report = a_report(5)
    header, _, *rows = table_of(reports.to_markdown(report))
    assert cells(reports.to_html(report)) == [cell for row in [header, *rows] for cell in row]


def test_html_refers_to_nothing_outside() -> None:
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", reports.to_html(a_report(4)))
    assert "http://" not in text
    assert "https://" not in text
    for element in parsed(text.replace("xlink:href", "href")).iter():
        assert element.tag not in ("script", "link", "img", "iframe")
        assert "src" not in element.attrib
        assert element.attrib.get("href", "#").startswith("#")


@pytest.mark.parametrize("index", [0, 1])
def test_html_escapes_hostile_text(index: int) -> None:
    report, keys = a_report(2), ("name", "path", "kind", "method")
    report["models"][index] |= {key: f"{HOSTILE}{key}\x1b" for key in keys}
    text = reports.to_html(report)
    parsed(text)
    assert "<script" not in text
    assert all(f"&lt;/script&gt;{key}" in text for key in keys)
    assert "\x1b" not in text


TO_SVG = reports.to_svg


def test_the_plot_does_not_heed_or_touch_the_readers_matplotlib() -> None:
    import matplotlib

    models = a_report(3)["models"]
    expected = TO_SVG(models)
    with matplotlib.rc_context({"axes.labelsize": 31, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert TO_SVG(models) == expected
        assert dict(matplotlib.rcParams) == before


def test_methods_and_formats_are_series_of_their_own_and_axes_turn_logarithmic_with_the_range() -> None:
    models = with_formats(a_report(1))["models"]
    shown = labels(TO_SVG(models))
    assert {"source", "aligned", "aligned, int4 cache", "not converted", "MHA", "GQA-4", "MQA"} <= set(shown)
    assert {"KV bytes per token (KiB, log scale)", "perplexity"} <= set(shown)
    models = [*models[:1], models[3] | {"method": "_svd", "perplexity": 900.0}]  # matplotlib leaves out labels that begin so
    assert {" _svd", "KV bytes per token (KiB)", "perplexity (log scale)"} <= set(labels(TO_SVG(models)))


def test_many_series_get_room_in_the_legend() -> None:
    """A figure whose axes collapse makes matplotlib warn, which fails a test."""
    models = [a_model(f"m{i}", f"MLA-{i}+8", f"method {i}", 9000 + i, 0.1) for i in range(30)]
    height = ElementTree.fromstring(TO_SVG(models)).attrib["height"]
    assert float(height.removesuffix("pt")) > 1000


def with_formats(report: dict[str, Any]) -> dict[str, Any]:
    """The source, GQA-4 and MQA, with the source's cache in int8 and int4, and GQA-4's in int4."""
    gqa, mqa = a_model("gqa", "GQA-4", "aligned", 12288, 0.1), a_model("mqa", "MQA", "aligned", 3072, 0.24)
    source = report["models"][0]
    stored = [
        a_model(f"{of['name']} ({form} cache)", of["kind"], of["method"], size, loss)
        | {"cache_dtype": form, "cache_format": form, "path": of["path"]}
        for of, form, size, loss in ((source, "int8", 13056, 0.001), (source, "int4", 7680.5, 0.02), (gqa, "int4", 3840, 0.12))
    ]
    return report | {"models": [source, *stored[:2], gqa, stored[2], mqa]}


NAME = "a|b\n<img>*c* [d](e) `f` \x1b[31m\u202e_g_"
ESCAPED = r"a\|b \<img\>\*c\* \[d\](e) \`f\`  \[31m \_g\_"


def test_markdown_shows_hostile_names_as_they_are() -> None:
    report = a_report(2)
    report["models"][1].update(name=NAME, method=NAME, calibration_overlap=0.25)
    report["protocol"]["text"] = NAME
    shown = reports.to_markdown(report)
    assert shown.count(ESCAPED) == 4, "name, method, text and warning"
    assert f"text {ESCAPED}, " in shown
    assert f"Warning: {ESCAPED} was fitted" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


def with_probes(report: dict[str, Any]) -> dict[str, Any]:
    """What `--context 512,1024` and the probes add."""
    quality = ("name", "perplexity", "loss_nats", "bits_per_byte", "tokens", "kl_to_source", "top1_agreement", "acceptance")
    further = [{key: model[key] for key in quality} for model in report["models"]]
    found = [
        {"task": "text", "at": 0, "answers": 2, "nats": 0.5, "standard_error": 0.25},
        {"task": "text", "at": 128, "answers": 2, "nats": 0.0, "standard_error": 0.0},
        {"task": "copy", "at": 128, "answers": 8, "nats": 1.0, "standard_error": 0.125, "exact": 0.5},
        {"task": "variables", "at": None, "answers": 1, "nats": 2.0, "standard_error": None, "exact": 0.0},
    ]
    return report | {
        "other_contexts": [{"context": 1024, "stride": 1024, "models": further}],
        "probes": [{"name": model["name"], "found": copy.deepcopy(found)} for model in report["models"]],
    }


def test_everything_that_was_measured_is_in_both_pages() -> None:
    report = with_probes(a_report(3))
    report["probes"][1]["name"] = report["other_contexts"][0]["models"][1]["name"] = HOSTILE
    markdown, page = reports.to_markdown(report), reports.to_html(report)
    tables = [table_of(part) for part in markdown.split("\n\n") if part.startswith("|")]
    assert [part[0][0] for part in tables] == ["model", "at context 1,024", "probe"]
    probes = tables[2]
    assert probes[0] == ["probe", "model", "0", "128", "anywhere"]
    assert [row[0] for row in probes[2:]] == [task for task in ("text", "copy", "variables") for _ in range(3)]
    assert probes[2] == ["text", "llama", "0.50", "0.00", "-"]
    assert probes[4] == ["text", "llama-1", "+0.50 ± 0.25", "+0.00 ± 0.00", "-"]
    assert probes[7] == ["copy", "llama-1", "-", "+1.00 ± 0.12 (50%)", "-"]
    assert probes[10] == ["variables", "llama-1", "-", "-", "+2.00 (0%)"]
    assert "at positions from 0, 128, … on" in markdown
    assert "+1.00 ± 0.12 (50%)" in cells(page)
    assert HOSTILE not in page

"""What the workload is: lines of JSON in, counts out."""

import json
from collections.abc import Iterator
from typing import Annotated

from blake3 import blake3
from pydantic import Field
from rollout.config.declared import KEPT, Setting
from rollout.config.section import Section
from rollout.model.item import NewItem, Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.input_lines import Line, fail, json_of
from rollout.workloads.json_form import JsonObject, canonical, dump_line, field_in, object_in, parse_result
from rollout.workloads.port import Checked, InputReader, Workload, Writer, input_section, unsuccessful
from rollout.workloads.sections import InputSection, OutputSection


class CountSection(Section):
    separator: Annotated[str | None, Setting("--separator")] = Field(default=None, description="Default: white space.")
    delay_ms: Annotated[float, KEPT] = 0


class CountSettings(Section):
    input: InputSection
    output: OutputSection
    count: CountSection = CountSection()


class CountWriter(Writer):
    files = ("counts.jsonl", "errors.jsonl")

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        line = {"row": entry.seq + 1, "text": json.loads(entry.payload)["text"]}
        if entry.outcome is Outcome.DONE:
            result = object_in(parse_result(entry.data), "the result")  # else this row fails
            yield "counts.jsonl", dump_line(line | {"words": field_in(result, "words", int)})
        else:
            yield "errors.jsonl", dump_line(line | {"code": unsuccessful(entry).code})


class Count(Workload[CountSettings, Checked]):
    name = "count"
    help = "Count the words of texts."
    settings = CountSettings
    sections = frozenset(CountSettings.model_fields)
    unit = "texts"
    measure = "characters"
    result_files = ("counts.jsonl", "errors.jsonl", "summary.json")

    def check(self, settings: CountSettings, reading: InputReader) -> Checked:
        def read(line: Line) -> None:
            value = json_of(line)
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                fail(line.file, line.line, 'there is no "text"')

        source, report = reading.rows(settings.input.patterns, read)
        config = {"input": input_section(settings.input.patterns, report), "count": settings.count.model_dump()}
        return Checked(config=config, total=report.rows, source=source)

    def plan(self, checked: Checked, config: JsonObject, start: int) -> Iterator[NewItem]:
        for line in checked.lines(start):
            identity = blake3(canonical([line.index, line.raw.decode(), config["count"]])).digest()
            yield NewItem(identity, line.raw)

    def writer(self, config: JsonObject) -> CountWriter:
        return CountWriter()

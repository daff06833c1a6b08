"""Asks the served model all tasks with OpenAI's client: python client.py [ROUNDS]

OPENAI_BASE_URL and OPENAI_API_KEY say where.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

client = OpenAI(max_retries=0)
model = client.models.list().data[0].id


def ask(row) -> bool:
    chunks = client.chat.completions.create(
        model=model, messages=row["messages"], temperature=0, max_tokens=8, stream=True
    )
    answer = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    print(f"{row['task_id']} {answer}\n", end="", flush=True)
    return answer.strip() == row["answer"]


tasks = [json.loads(line) for line in Path("data/tasks.jsonl").read_text().splitlines()]
tasks *= int(sys.argv[1]) if len(sys.argv) > 1 else 1
with ThreadPoolExecutor(8) as pool:
    right = list(pool.map(ask, tasks))
print(json.dumps({"asked": len(right), "right": sum(right)}))

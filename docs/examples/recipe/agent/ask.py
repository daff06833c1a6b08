"""The agent of experiment.yaml: asks the model of its variant once, over OpenAI's interface."""

import json
import os
import urllib.request
from pathlib import Path

task = json.loads(Path(os.environ["AGENTLAB_TASK_PATH"]).read_text())
row = task["task"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["messages"]}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"].strip()
outcome = "success" if answer == row["answer"] else "failure"
result = {"ids": task["ids"], "outcome": outcome, "answer": answer}
Path(os.environ["AGENTLAB_RESULT_PATH"]).write_text(json.dumps(result))

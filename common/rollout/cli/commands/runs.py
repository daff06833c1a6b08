"""`rollout run`: the group of all its commands."""

from rollout.cli.commands import run, run_items, run_results

app = run.app
app.command("items")(run_items.items)
app.command("results")(run_results.results)

"""The recipes of docs/integrations.md, as they stand there, with the real TensorBoard and the real MLflow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import present
from launching import environment, mpirun, run

DOCS = Path(__file__).resolve().parents[1] / "docs"
pytestmark = pytest.mark.jobs

READ = {
    "TensorBoard": """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("runs/tensorboard").Reload()
print("found", json.dumps({tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
""",
    "MLflow": """
import json, mlflow
(run,) = mlflow.search_runs(output_format="list", experiment_ids=["0"])
client = mlflow.MlflowClient()
history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print("found", json.dumps({name: [metric.step for metric in metrics] for name, metrics in history.items()}))
""",
}


@pytest.mark.parametrize(
    ("tool", "package", "prefix"), [("TensorBoard", "tensorboard", "hvdplus/"), ("MLflow", "mlflow", "hvdplus.")]
)
def test_a_recipe_works_as_it_stands(tool, package, prefix, tmp_path):
    if not present("torch", package):
        pytest.skip(f"{package} or PyTorch is not installed")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "integrations.md").read_text(), re.M | re.S))
    (recipe,) = re.findall(r"```python\n(.*?)```", sections[tool], flags=re.DOTALL)
    (training,) = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart-pytorch.md").read_text(), flags=re.DOTALL)
    before, loop, rest = training.partition("for epoch in range(4):\n")
    script = tmp_path / "train.py"
    script.write_text(f"{before}\n{recipe}\n{loop}{rest}")
    store = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    code, output = run(mpirun(2, sys.executable, "-P", str(script)), timeout_seconds=180, cwd=tmp_path, **store)
    assert code == 0, output
    read = subprocess.run(
        [sys.executable, "-P", "-c", READ[tool]], cwd=tmp_path, env=environment(**store), capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    (line,) = (line for line in read.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    for name in ("step_ms", "compute_ms", "exposed_comm_ms", "loss"):
        steps = found[prefix + name]
        assert len(steps) >= 20 and steps == sorted(set(steps)), "one value a window"

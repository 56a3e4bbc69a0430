"""The recipes of docs/torchrun.md, as they stand there, with the packages themselves, two ranks on CPUs."""

import re
from pathlib import Path

import pytest
from frameworks import present
from launching import run, torchrun

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "torchrun.md").read_text()
pytestmark = pytest.mark.jobs

MODEL = """
import os, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
import hvdplus.torch as hvd

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.ReLU(), torch.nn.Linear(80, 4))

def make_loader():
    torch.manual_seed(1)
    x = torch.randn(512, 40)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)

def finish(model, attached):
    import torch.distributed as dist
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    steps = attached.hvdplus.steps + attached.hvdplus.unread_steps
    moved = not torch.equal(mine, torch.nn.utils.parameters_to_vector(make_model().parameters()).detach())
    same = all(torch.equal(theirs, mine) for theirs in everyone)
    print(f"finished: {steps} steps, moved {moved}, identical {same}", flush=True)

model, loader = make_model(), make_loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""

LIGHTNING = """
import lightning
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
"""

TRAINER = """
import transformers

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()
    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

model = Net()
data = [{"x": x, "labels": label} for x, label in zip(*loader.dataset.tensors)]
arguments = transformers.TrainingArguments(
    "out", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=16, report_to=[], save_strategy="no",
    disable_tqdm=True, max_grad_norm=1.0, learning_rate=0.05,
)
"""

RAY = """
import ray, ray.train, ray.train.torch
ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=True)
run_config = ray.train.RunConfig(storage_path=os.getcwd())
"""

KERAS = """
import keras
import hvdplus.keras as hvd
x, y = (tensor.numpy() for tensor in loader.dataset.tensors)
"""
KERAS_AFTER = """
same = hvd.identical(model.weights)
print(f"finished: {int(model.optimizer.iterations)} steps, moved True, identical {same}", flush=True)
"""

RECIPES = {
    # heading of the page: package, what comes before, what comes after, launched by
    "With Lightning": ("lightning", LIGHTNING, "finish(trainer.lightning_module.net, attach.attached)", torchrun),
    "With Accelerate": ("accelerate", "import accelerate", "finish(model, attached)", torchrun),
    "With the Trainer of Hugging Face": (
        "transformers",
        TRAINER,
        "finish(trainer.model.net, attach.attached)",
        torchrun,
    ),
    "With Ray Train": ("ray", RAY, "", None),
    "With Keras on PyTorch": ("keras", KERAS, KERAS_AFTER, torchrun),
}


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_works_as_it_stands(heading, tmp_path):
    package, before, after, launcher = RECIPES[heading]
    if not present(package):
        pytest.skip(f"{package} is not installed")
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    (recipe,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    recipe = recipe.replace("callbacks=[attach])\ntrainer.fit", "callbacks=[attach], **quiet)\ntrainer.fit")
    recipe = recipe.replace("workers).fit", "workers, run_config=run_config).fit")
    if "def train" in recipe:  # the end of the workers' function
        recipe = recipe.replace("\n\n\nworkers", "\n    finish(model, attached)\n\n\nworkers")
    assert len([line for line in recipe.splitlines() if line.strip()]) <= 12
    path = tmp_path / "script.py"
    path.write_text(f"{MODEL}\n{before}\n{recipe}\n{after}\n")
    command = launcher(2, "python", str(path)) if launcher else ["python", str(path)]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "KERAS_BACKEND": "torch",
    }
    code, output = run(command, 240, cwd=tmp_path, **quiet)
    assert code == 0, output
    done = re.findall(r"finished: (\d+) steps, moved True, identical True", output)
    assert len(done) >= 2 and min(map(int, done)) >= 16, output  # Ray shows lines twice


def test_the_hooks_lines_are_in_the_page_and_in_the_example():
    example = (Path(__file__).resolve().parents[1] / "examples" / "pytorch_ddp.py").read_text()
    added = [line for line in example.splitlines() if line.endswith("# +")]
    assert len(added) <= 10
    assert "hvd.ddp.attach(model, optimizer" in PAGE

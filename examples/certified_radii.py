# How far around an input no other answer is possible, by bounds; and that attacks do not contradict it.
import torch

from stobatch import attacks, bounds

torch.manual_seed(0)
labels = torch.arange(300) % 3
inputs = torch.tensor([[0.6, 0.6], [-0.6, 0.6], [0.0, -0.6]])[labels] + 0.1 * (2 * torch.rand(300, 2) - 1)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(200):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimiser.step()
certificates = bounds.certify(model, inputs, [0.05, 0.1, 0.2, 0.8], labels)
print(certificates[0])
for radius in (0.1, 0.8):
    broken = attacks.attack(model, inputs, labels, radius).success
    print(f"linf {radius}: {certificates.certified(radius).mean():.0%} certified, {broken.float().mean():.0%} broken")
print(certificates)

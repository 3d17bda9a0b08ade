# A training loop of one's own, with any module and optimiser; clipping, noise and accounting are the library's.
import torch

from stobatch import data, dp, seeds

labels = torch.randint(2, (2000,))
inputs = torch.randn(2000, 2) + 6.0 * labels[:, None] - 3.0
model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
losses = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
sigma = dp.noise_multiplier(target_epsilon=1.0, poisson_sampling_rate=0.1, steps=50, delta=1e-5)
for _ in range(50):
    rows = data.poisson_sample(2000, 0.1, seeds.Seeds.secret().stream("sample"))
    sums = dp.clipped_sum(model, losses, (inputs[rows], labels[rows]), clip_norm=1.0)
    noisy = dp.add_noise(sums, sums.noise_stddev(sigma))
    for name, parameter in model.named_parameters():
        parameter.grad = noisy[name] / 200  # the expected batch, a public constant; not len(rows)
    optimiser.step()
print(f"accuracy {(model(inputs).argmax(1) == labels).float().mean():.2f}, noise multiplier {sigma:.2f}")
print(repr(dp.epsilon(noise_multiplier=sigma, poisson_sampling_rate=0.1, steps=50, delta=1e-5)))

# What one step of training gave away, from below: a claim that holds, and the same claim with a tenth of its noise.
import torch

from stobatch import auditing, dp, seeds

included = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.5
canaries = torch.eye(1000)[included]  # each pulls at a weight of its own
model = torch.nn.Linear(1000, 1, bias=False)
sums = dp.clipped_sum(model, lambda model, batch: -model(batch[0])[:, 0], (canaries,), clip_norm=1.0)
claim = dp.epsilon(noise_multiplier=2.0, poisson_sampling_rate=1.0, steps=1, delta=1e-5)
print(claim)
for sigma in (2.0, 0.2):
    stream = seeds.Seeds.reproducible(0).stream("public, so that this page can be repeated", str(sigma))
    noisy = dp.add_noise(sums, sums.noise_stddev(sigma), stream)
    bound = auditing.one_run_bound(-noisy["weight"][0], included, delta=1e-5, confidence=0.95)
    print(f"noise {sigma}: {bound}; the claim is {'REFUTED' if bound.epsilon > claim.epsilon else 'not refuted'}")

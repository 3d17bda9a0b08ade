# The class that a module names most often under noise, and how far that holds: any module, no layers to follow.
import torch

from stobatch import votes


class Strip(torch.nn.Module):
    def forward(self, points):
        distance = points[:, 0].abs()
        return torch.stack([0.5 - distance, distance - 0.5], 1)


inputs = torch.tensor([[0.0, 0.3], [0.5, 0.0], [1.0, -0.9]])
seeded = torch.Generator().manual_seed(0)  # so that this page can be repeated
certificates = votes.certify(Strip(), inputs, 0.05, draws=10_000, failure_probability=0.001, generator=seeded)
for certificate in certificates:
    print(certificate)
print(certificates)

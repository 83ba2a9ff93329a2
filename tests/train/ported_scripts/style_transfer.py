"""Fast style transfer: one network is trained, another one is frozen and computes the loss."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])


class LossNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.slices = nn.ModuleList([nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)])
        for parameter in self.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        features = []
        for part in self.slices:
            x = F.relu(part(x))
            features.append(x)
        return features


def gram_matrix(features):
    batch, channels, height, width = features.shape
    flat = features.view(batch, channels, height * width)
    return flat @ flat.transpose(1, 2) / (channels * height * width)


torch.manual_seed(0)
images = torch.rand(32, 3, 8, 8)
loader = DataLoader(TensorDataset(images), batch_size=BATCH)
transformer = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
)
vgg = LossNetwork()
with torch.no_grad():
    style = [gram_matrix(each) for each in vgg(torch.rand(1, 3, 8, 8).round())]
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.02)
transformer, vgg, optimizer, loader = paceline.prepare(transformer, vgg, optimizer, loader)

losses = []
for _ in range(4):
    for (x,) in loader:
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = F.mse_loss(features_y[1], features_x[1])
        style_loss = sum(
            F.mse_loss(gram_matrix(each), gram.expand(len(x), -1, -1))
            for each, gram in zip(features_y, style, strict=True)
        )
        loss = content_loss + 100.0 * style_loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

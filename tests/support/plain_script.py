"""A script that trains under `offbeat.init`."""

from __future__ import annotations

SCRIPT = """\
    import sys, torch, offbeat
    data = torch.utils.data.TensorDataset(torch.ones(16, 1), torch.ones(16, 1))
    with offbeat.init(seed=0) as team:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader = team.prepare(model, optimizer, loader)
        for _ in team.epochs(int(sys.argv[1])):
            for x, y in loader:
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            team.report(loss=1.0)
    """

"""Covariances and correlations, of split variables and of split observations."""

import torch

from tests.spatial.cases import Case, as_in_one_process, small

WEIGHTS = torch.arange(7) % 3 + 1

CASES: dict[str, Case] = {
    "observations": small(lambda x: [torch.cov(x[0].flatten(1)), x[0, 0].cov(correction=0), torch.cov(x[0, 1, 2])]),
    "variables": small(lambda x: [x[0, 0].mT.cov(), torch.corrcoef(x[0, 0].mT), x[0].flatten(1).mT[:40].corrcoef()]),
    "weights": small(lambda x: [
        x[0, :, :, 0].cov(fweights=WEIGHTS), torch.cov(x[0, 0, :, 1], aweights=WEIGHTS / 2),
        x[0, :, :, 1].cov(aweights=x[1, 0, :, 1].detach().abs(), correction=2),
        x[0, 0].mT.cov(fweights=WEIGHTS, aweights=WEIGHTS / 3)]),
    "correlations": small(lambda x: [
        torch.corrcoef(x[0].flatten(1)), x[1, 0, 0].corrcoef(), x[:1, 0].sum(0).corrcoef()]),
    "complex": small(lambda x: [
        torch.view_as_real(f(torch.complex(x[0, 0], x[0, 1]))) for f in (torch.cov, torch.corrcoef)]),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)

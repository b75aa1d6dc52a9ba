"""What Kubernetes has to know beside the cluster itself: image, cards, memory of processes. For `cluster.manifests`.

`kvrelay up` takes it and uses none of it: one file describes a cluster wherever it runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cluster.quoting import quoted
from engine.errors import ConfigError

_GIB = 1024**3
_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """The pods of one pool: each holds one worker."""

    process_bytes: int = 3 * _GIB
    """Memory of a worker beside its KV pool and `swap_space`: weights, activations, torch, Ray's own processes."""
    gpus: int = 0
    """Cards of each pod."""
    card: str = ""
    """Only nodes with this card: their label nvidia.com/gpu.product. Default: any."""

    def __post_init__(self) -> None:
        if self.process_bytes < _GIB // 2:
            raise ConfigError(f"process_bytes must be at least 512 MiB, got {self.process_bytes}")
        if not 0 <= self.gpus <= 64:
            raise ConfigError(f"gpus must be in [0, 64], got {self.gpus}")
        if self.card and not _LABEL_VALUE.fullmatch(self.card):
            raise ConfigError(f"card must be the value of a node's label, got {quoted(self.card)}")
        if self.card and not self.gpus:
            raise ConfigError("card needs gpus of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySpec:
    image: str = "kvrelay:cpu"
    """Of all pods: made by `docker build --target cpu` or `--target cuda`."""
    image_pull_policy: str = "IfNotPresent"
    namespace: str = ""
    """Default: that of whoever applies the objects."""
    model_claim: str = ""
    """PersistentVolumeClaim with models, mounted read-only at /models in every pod. Default: each pod pulls its own."""
    head_bytes: int = 4 * _GIB
    """Memory of the container with the router and Ray's head."""
    prefill: PodSpec = field(default_factory=PodSpec)
    decode: PodSpec = field(default_factory=PodSpec)

    def __post_init__(self) -> None:
        if not self.image or re.search(r"\s", self.image):
            raise ConfigError(f"image must be the name of an image, got {quoted(self.image)}")
        if self.image_pull_policy not in PULL_POLICIES:
            known = ", ".join(PULL_POLICIES)
            raise ConfigError(f"image_pull_policy must be one of {known}, got {quoted(self.image_pull_policy)}")
        for name in ("namespace", "model_claim"):
            if (value := getattr(self, name)) and not _DNS_LABEL.fullmatch(value):
                raise ConfigError(f"{name} must be a name in Kubernetes, got {quoted(value)}")
        if self.head_bytes < _GIB:
            raise ConfigError(f"head_bytes must be at least 1 GiB, got {self.head_bytes}")

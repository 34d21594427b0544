"""What sections of the configuration are made of, and those that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, StringConstraints(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys and loose types are mistakes; a loaded configuration does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=False)


class TLSSection(Section):
    """PEM files with which both ends of a connection prove themselves; relative to the configuration's folder."""

    certificate: Text
    key: Text
    ca: Text  # whom the peer's certificate must come from

    @property
    def paths(self) -> dict[str, str]:
        """By key."""
        return {"certificate": self.certificate, "key": self.key, "ca": self.ca}


class ClusterTLSSection(TLSSection):
    """The same for gRPC within the cluster."""

    name: Text = "baton"  # a DNS name that every certificate of the cluster carries


class FrontTLSSection(Section):
    """PEM files of the two front doors; relative to the configuration's folder."""

    certificate: Text
    key: Text
    client_ca: Text | None = None  # clients must show a certificate of this authority; None: they show none

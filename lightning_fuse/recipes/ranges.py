"""Ranges of the recipes' settings, for the signatures of their models and data.

The command line reads them there: ``batch_size: Count`` refuses ``data.batch_size=0`` with what is possible. A recipe
of one's own may use them, or write ``Annotated[int, Field(ge=1)]`` with pydantic's ``Field`` itself.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[int, Field(ge=1, le=2**20)]  # of a layer
Workers = Annotated[int, Field(ge=0, le=1024)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]

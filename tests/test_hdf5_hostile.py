"""Files that HDF5's own library does not survive are one line here."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from prepared import REPOSITORY

from protperf.formats import FormatError
from protperf.formats.embeddings import read_embeddings

KEPT = REPOSITORY / "tests" / "kept"

HOSTILE: dict[str, dict[int, int]] = {
    "ends the process": {5499 + place: 57 for place in range(8)},
    "never ends": {1224: 255},
    "takes gigabytes": {3971: 128, 5139: 212, 5140: 212},
}
"""What HDF5's library does with a kept file of which these bytes are others."""


def hostile(path: Path, name: str) -> Path:
    data = bytearray((KEPT / "embeddings_v1_mean.h5").read_bytes())
    for place, byte in HOSTILE[name].items():
        data[place] = byte
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_what_hdf5_s_library_cannot_read_is_one_line(tmp_path: Path, name: str):
    path = hostile(tmp_path / "a.h5", name)
    with pytest.raises(FormatError, match=r"/a\.h5: .*\b(protperf_version|header|kind)\b") as caught:
        read_embeddings(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(h5py.version.hdf5_version != "2.0.0", reason="said of HDF5 2.0.0")
@pytest.mark.parametrize("name", HOSTILE)
def test_hdf5_s_library_fails_as_the_page_on_security_says(tmp_path: Path, name: str):
    """In a process that is ended after 3 s of processor time; no core is written."""
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import h5py
with h5py.File(sys.argv[1]) as file:
    try:
        [dict(owner.attrs) for owner in (file, *file.values())]
    except OSError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, hostile(tmp_path / "a.h5", name)], capture_output=True, text=True
    )
    ended = {"ends the process": -signal.SIGSEGV, "never ends": -signal.SIGKILL, "takes gigabytes": 0}
    assert done.returncode == ended[name], done.stderr
    assert done.returncode or int(done.stdout) >= 2

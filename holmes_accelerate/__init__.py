# SPDX-License-Identifier: Apache-2.0
"""Holmes for Hugging Face Accelerate: under construction. This release offers nothing here; use `holmes_lightning`."""

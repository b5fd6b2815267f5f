# SPDX-License-Identifier: Apache-2.0
"""What is wrong: checks of hosts and readers of logs, each finding as seen / means / do."""

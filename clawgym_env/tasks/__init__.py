"""Tasks: what they are, how sets of them are named, and what a verifier's score means."""

from clawgym_env.tasks.base import Task, TaskLimits, Verifier
from clawgym_env.tasks.families import FAMILIES, Family, get_family
from clawgym_env.tasks.tasksets import FamilyTasks, JoinedTasks, ListTasks, TaskSet, load_tasks
from clawgym_env.tasks.verifying import VerifierResult, parse_score

__all__ = [
    "FAMILIES",
    "Family",
    "FamilyTasks",
    "JoinedTasks",
    "ListTasks",
    "Task",
    "TaskLimits",
    "TaskSet",
    "Verifier",
    "VerifierResult",
    "get_family",
    "load_tasks",
    "parse_score",
]

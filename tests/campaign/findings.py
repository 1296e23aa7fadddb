"""What the campaigns share: their findings, and an environment that no setting of the caller reaches."""
import os

fallen = []


def fell(*words):
    fallen.append(words)
    print("FELL", *words, flush=True)


def environment(place, passfile="pass"):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCKBOX_")}
    kept.update(XDG_RUNTIME_DIR=place, XDG_STATE_HOME=place + "/state", LOCKBOX_PASSFILE=f"{place}/{passfile}")
    return kept

"""Where random work begins. The same code gets the same work, so that what passed here passes there; whoever looks for more asks for it:
ELSEWHERE_TEST_SEED=random begins anywhere, a number begins there."""

import os
import random
import zlib

RANDOM = "random"


def seed_of() -> int:
    wanted = os.environ.get("ELSEWHERE_TEST_SEED", "")
    if wanted == RANDOM:
        return random.SystemRandom().randrange(1 << 32)
    return int(wanted) if wanted else zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].encode())

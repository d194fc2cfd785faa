"""lab-11's contract once more, without asyncio: a list of what happens, and when.

The thread takes turns; what a turn brings is delivered at its time, and read as soon as its reader reads.
"""

from collections import Counter

from labs.kit import Skip

STEP, AGES = 0.1, 20.0
GONE = "the device is gone"


class Client:
    """A client: what is on its way to it, how much it reads, and how it stands."""

    def __init__(self, request_id, num_tokens, reads, now):
        self.request_id, self.num_tokens, self.reads, self.since = request_id, num_tokens, reads, now
        self.inbox, self.read, self.state, self.said = [], [], "waits", 0

    @property
    def is_open(self):
        return self.state in ("waits", "does not read")

    def catch_up(self, now):
        """Read what is there by now."""
        while self.state == "waits" and self.inbox and self.inbox[0][0] <= now:
            time, what, end = self.inbox.pop(0)
            time = max(time, self.since)
            if what == "refused":
                self.state = f"{end} at {time:.2f} s"
            else:
                self.read.append(what.format(f"{time:.2f} s"))
                if end:
                    self.state = f"done at {time:.2f} s"
                elif len(self.read) == self.reads:
                    self.state = "does not read"


class World:
    """All clients, the engine's requests in order, and the commands that wait for the thread."""

    def __init__(self, config):
        self.slots, self.most = config["slots"], config["max_num_requests"]
        self.now, self.free_at, self.closed, self.trouble = 0.0, 0.0, False, ""
        self.clients, self.answers, self.engine, self.commands, self.computed = {}, {}, [], [], []

    # ---- the calls

    def open(self, name, request_id, num_tokens, reads):
        if name in self.clients:
            raise Skip
        full = self.num_open() >= self.most
        client = self.clients[name] = Client(request_id, num_tokens, reads, self.now)
        if self.closed or full:
            client.state = f"Engine{'Closed' if self.closed else 'Full'}Error at {self.now:.2f} s"
        else:
            self.command("add", name)

    def resume(self, name):
        if name not in self.clients or self.clients[name].state != "does not read":
            raise Skip
        client = self.clients[name]
        client.state, client.since, client.reads = "waits", self.now, 0
        client.catch_up(self.now)

    def leave(self, name):
        if name not in self.clients or not self.clients[name].is_open:
            raise Skip
        self.clients[name].state = f"left at {self.now:.2f} s"
        self.command("abort", name)

    def look(self, name, seconds):
        self.answers[name] = (self.now, "waits")
        if self.closed:
            self.answers[name] = (self.now, "EngineClosedError")
        else:
            self.command("look", name, seconds)

    def fail(self, reason):
        self.trouble = reason

    def close(self):
        self.command("close", "")

    def wait(self, seconds):
        self.advance(seconds)

    def advance(self, seconds):
        self.turns(self.now + seconds)
        self.now += seconds
        for client in self.clients.values():
            client.catch_up(self.now)

    def drain(self):
        self.advance(AGES)
        kept = [] if self.trouble else sorted(self.clients[name].request_id for name in self.engine)
        return {"wait for ever": [], "left in the engine": kept}

    # ---- the thread

    def command(self, *command):
        if not self.closed:
            self.commands.append(command)
            self.advance(0)

    def turns(self, until):
        """All turns that begin by then. The next one begins when the last is over, or when there is work."""
        while not self.closed and (self.commands or self.engine):
            begin = max(self.free_at, self.now)
            if begin > until:
                return
            self.turn(begin)

    def turn(self, time):
        commands, self.commands = self.commands, []
        for what, name, *more in commands:
            if self.closed and what == "add":
                self.clients[name].inbox.append((time, "refused", "EngineClosedError"))
            elif self.closed and what == "look":
                self.answers[name] = (time, "EngineClosedError")
            elif what == "add":
                if any(self.clients[one].request_id == self.clients[name].request_id for one in self.engine):
                    self.clients[name].inbox.append((time, "refused", "ValueError"))
                else:
                    self.engine.append(name)
            elif what == "abort" and name in self.engine:
                self.engine.remove(name)
            elif what == "look" and more[0] < 0:
                self.answers[name] = (time, "LookupError")
            elif what == "look":
                time += more[0]
                ids = sorted(self.clients[one].request_id for one in self.engine)
                self.answers[name] = (time, " ".join(ids) or "none")
            elif what == "close":
                self.closed = True
                self.fail_all(time, "the engine was closed")
                self.engine = []
        self.free_at = time
        if self.engine and self.trouble:
            self.fail_all(time, self.trouble)
            self.closed = self.trouble == GONE
            if not self.closed:
                self.engine, self.trouble = [], ""
        elif self.engine:
            self.step(time + STEP)

    def step(self, time):
        self.free_at = time
        for name in self.engine[: self.slots]:
            client = self.clients[name]
            client.said += 1
            self.computed.append((time, name))
            is_last = client.said == client.num_tokens
            text = f"{name}{client.said - 1} at {{}}{', the last' if is_last else ''}"
            client.inbox.append((time, text, is_last))
            if is_last:
                self.engine.remove(name)

    def fail_all(self, time, why):
        for name in self.engine:
            self.clients[name].inbox.append((time, f"error at {{}}: {why}", True))

    # ---- what is seen

    def num_open(self):
        return sum(client.is_open for client in self.clients.values())

    def seen(self):
        return {
            "time": f"{self.now:.2f} s",
            "read": {name: client.read for name, client in self.clients.items()},
            "clients": {name: client.state for name, client in self.clients.items()},
            "answers": {
                name: "waits" if answer == "waits" or time > self.now else f"{answer} at {time:.2f} s"
                for name, (time, answer) in self.answers.items()
            },
            "tokens computed": Counter(name for time, name in self.computed if time <= self.now),
            "num_requests": self.num_open(),
            "faults": [],
        }

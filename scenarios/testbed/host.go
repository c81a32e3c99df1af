package testbed

import (
	"context"

	"github.com/fencelab/fencelab/faults"
)

// host is where a server runs. Its methods aren't called concurrently.
type host interface {
	placement() placement                           // without what the group and the user add
	peer(name string) peer                          // as servers of its network see it
	addr() string                                   // for clients
	start(ctx context.Context, c command) error     // returns before the server answers
	runOnce(ctx context.Context, c command) error   // runs a command to its end, while the server is down
	exitError(ctx context.Context) error            // a [permanent] error with the end of its log, if it has ended
	kill(ctx context.Context) error                 // by SIGKILL; returns once it has exited
	pause(ctx context.Context) (faults.Heal, error) // returns when it is frozen
	wipe(ctx context.Context) error                 // empties its data directory, while it is down
	remove(ctx context.Context) error               // ends it and removes everything of it; may be called again
}

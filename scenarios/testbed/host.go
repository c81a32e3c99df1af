package testbed

import (
	"context"

	"github.com/fencelab/fencelab/faults"
)

// host is where a server runs, and what can be done to it there. Its methods aren't called concurrently.
type host interface {
	addrs(ctx context.Context) ([]string, error)    // at which clients may reach it
	start(ctx context.Context, c command) error     // returns before the server answers
	once(ctx context.Context, c command) error      // runs a command to its end, while the server is not running
	ended(ctx context.Context) error                // a [permanent] error with the end of its log, if it has ended
	kill(ctx context.Context) error                 // by SIGKILL; returns when it is gone
	pause(ctx context.Context) (faults.Heal, error) // returns when it is frozen
	wipe(ctx context.Context) error                 // empties its data directory, while it is not running
	remove(ctx context.Context) error               // ends it and removes all that is left of it; may be called again
}

// hosts are those of a group: one host for each server, and what they share.
type hosts interface {
	host(i int) host
	placement(i int) placement        // without the user's arguments
	remove(ctx context.Context) error // what the hosts share, once they are removed
}

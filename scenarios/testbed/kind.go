package testbed

import (
	"context"
	"time"
)

// How to add a kind of server: write a file with
//
//   - a [kind]: its names, its image, how to find the program on this machine, its ports, its data directory in the
//     container, a readiness check that returns the version, and what an external address means;
//   - a Start function that calls [start] with a [group]: the names of the servers to start together, and the command
//     that runs each of them at its [place], as a local process or in a container.
//
// Providers, faults, restarts, clean-up after signals and sweeping are the same for every kind: start.go, server.go,
// local.go, container.go, guard.go.

// A kind is what all servers of one kind have in common.
type kind struct {
	name    string        // "redis": in a server's String, in the names of files and networks
	title   string        // "Redis": in messages
	env     string        // "REDIS": in the names of environment variables, see envImage and the others
	image   string        // what containers run by default
	ports   []int         // on which it listens in a container, the clients' first; local ones get as many free ones
	data    string        // its data directory in a container
	timeout time.Duration // from the start of the process to its first answer
	want    string        // what the external address may be: "host:port"

	// url returns Server.URL.
	url      func(addr string) string
	programs []string // that a local server takes, the first of which stands for it
	dirs     []string // where they may be, beside PATH: patterns
	apt      string   // the Debian packages that have them
	brew     string   // the same of macOS
	module   string   // in testdata/servers: from which make builds them in bin, where no package has them
	// ready asks the server once for its version. An error means that it is to be asked again: it isn't ready to serve.
	// If pid isn't 0 and the server can tell that it is another process, it is another server, which took the port.
	ready func(ctx context.Context, addr string, pid int) (version string, err error)
	// leads asks the server once whether it leads the others. nil: such servers don't elect leaders.
	leads func(ctx context.Context, addr string) (bool, error)
	// clock asks the server once what its wall clock shows. nil: it can't be started with Options.Clock.
	clock func(ctx context.Context, addr string) (time.Time, error)
	// external finds the users' servers at what the environment names. nil: see findExternal.
	external func(ctx context.Context, k *kind, set string) ([]*Server, error)
	// embedded starts one imitation. nil: there is none.
	embedded func() (addr, version string, stop func() error, err error)
}

func (k *kind) envImage() string  { return "FENCELAB_" + k.env + "_IMAGE" }
func (k *kind) envServer() string { return "FENCELAB_" + k.env + "_SERVER" }
func (k *kind) envAddr() string   { return "FENCELAB_" + k.env + "_ADDR" }

// A group is one or several servers of one kind that are started and removed together.
type group struct {
	*kind
	names  []string  // of the servers
	linked bool      // they reach one another as place.Peers, and those in join as place.Joined
	join   []*Server // run already, of the same provider
	// command returns what runs a server at its place, which it may prepare (files in Dir, on this machine only).
	// It is called before every start.
	command func(ctx context.Context, at place) (command, error)
}

// A command runs a server.
type command struct {
	Path   string            // local only; default: place.Path
	Args   []string          // argv, whose first element is the program's name; in a container, the image's CMD
	Env    []string          // NAME=value, added to those there are
	Files  map[string][]byte // by absolute path; there before the command runs
	mounts []string          // paths of files on this machine, which a container has too
}

// A place is where a server is to run, as the server sees it.
type place struct {
	Provider Provider // [Local] or [Containers]
	Path     string   // local only: the program or installation
	Dir      string   // its data directory: kept from kill to restart, unless wiped
	Listen   string   // the IP address to listen on
	Self     int      // its own index in Peers
	Peers    []peer   // all servers of the group, in order
	Joined   []peer   // those in group.join, in order
	More     []string // the user's further arguments
}

// A peer is a server as another one of its group reaches it.
type peer struct {
	Name  string
	Host  string
	Ports []int // as in kind.ports
}

// me returns the place's own entry in Peers.
func (at place) me() peer { return at.Peers[at.Self] }

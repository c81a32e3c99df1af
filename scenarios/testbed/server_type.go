package testbed

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A serverType is all that is known of one type of server. To add one, write a file with its serverType and its Start
// function. Providers, faults, restarts and clean-up are the same for every type.
type serverType struct {
	name  string // "redis": in Server.String, and in upper case in names of environment variables
	title string // "Redis": in messages
	image string // what containers run by default; testdata/setup reads it here
	ports []int  // in a container, the clients' first; a local server gets as many free ones
	data  string // its data directory in a container

	program string   // what a local server runs
	dirs    []string // patterns of directories that may have it, beside PATH
	apt     string   // the Debian packages that have it
	brew    string   // those of macOS
	module  string   // or the module in testdata/servers from which make builds it in bin

	url     string   // format of Server.URL, given host:port
	schemes []string // of URLs that FENCELAB_*_ADDR may have; none: host:port only
	// accept checks and completes such a URL, or what url made of a bare host:port. nil: any will do.
	accept func(u *url.URL, bare bool) bool

	linked bool // several started together are a cluster: they reach one another as placement.Peers
	// command returns what runs a server at its place. It is called before every start.
	command func(ctx context.Context, at placement) (command, error)
	// ready asks the server once for its version; an error means "not ready yet".
	ready func(ctx context.Context, addr, url string, local bool) (version string, err error)
	// leads asks the server once whether it leads. nil: such servers elect no leader.
	leads func(ctx context.Context, addr string) (bool, error)
	// clock asks the server once for its wall clock. nil: it can't be started with Options.Clock.
	clock func(ctx context.Context, addr string) (time.Time, error)
	// embedded starts an imitation. nil: there is none.
	embedded func() (addr, version string, stop func() error, err error)
}

// env is the name of one of the type's environment variables.
func (t *serverType) env(what string) string {
	return "FENCELAB_" + strings.ToUpper(t.name) + "_" + what
}

// wants says what FENCELAB_*_ADDR may be.
func (t *serverType) wants() string {
	if t.schemes == nil {
		return "host:port"
	}
	return "host:port or a URL (" + strings.Join(t.schemes, "://, ") + "://)"
}

// locate parses what the user gave as a server's address. Its error doesn't quote that: it may have a password.
func (t *serverType) locate(set string) (addr, at string, err error) {
	if t.schemes == nil {
		return set, fmt.Sprintf(t.url, set), nil
	}
	bare := !strings.Contains(set, "://")
	if bare {
		set = fmt.Sprintf(t.url, set)
	}
	u, err := url.Parse(set)
	if err != nil || u.Host == "" || !slices.Contains(t.schemes, u.Scheme) || t.accept != nil && !t.accept(u, bare) {
		return "", "", fmt.Errorf("%s must be %s", t.env("ADDR"), t.wants())
	}
	addr = u.Host
	if u.Port() == "" {
		port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
		addr = net.JoinHostPort(u.Hostname(), cmp.Or(port, strconv.Itoa(t.ports[0])))
	}
	return addr, u.String(), nil
}

// A group is servers of one type that are started and removed together.
type group struct {
	*serverType
	names []string
	join  []*Server // running servers of the same provider that these reach as placement.Joined
}

// numbered returns prefix1 to prefixN.
func numbered(prefix string, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("%s%d", prefix, i+1))
	}
	return names
}

// startOne starts a server that is alone in its group.
func startOne(ctx context.Context, t *serverType, o *Options) (*Server, error) {
	return start1(ctx, &group{serverType: t, names: []string{t.name}}, o)
}

// A command runs a server.
type command struct {
	Path   string            // local only; default: placement.Path
	Args   []string          // argv, whose first element is the program's name; in a container, the image's CMD
	Env    []string          // NAME=value, added to those there are
	Files  map[string][]byte // by absolute path; written before the command runs
	mounts []string          // paths of files on this machine that a container has too
}

// A placement is where a server runs, as the server sees it.
type placement struct {
	Provider Provider // [Local] or [Containers]
	Path     string   // local only: the program
	Dir      string   // its data directory: kept over a restart, unless wiped
	Listen   string   // the IP address to listen on
	Self     int      // its own index in Peers
	Peers    []peer   // all servers of the group, in order
	Joined   []peer   // those in group.join, in order
	More     []string // the user's further arguments
}

// A peer is a server as others of its group reach it.
type peer struct {
	Name  string
	Host  string
	Ports []int // as in serverType.ports
}

func (at placement) me() peer { return at.Peers[at.Self] }

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

// serverType describes a type of server. To add one, write a file with it and its Start function.
type serverType struct {
	name  string // "redis": in Server.String and, in upper case, in environment variables
	title string // "Redis": in messages
	image string // for containers; testdata/setup reads it here
	ports []int  // in a container, the clients' first; a local server gets as many free ones
	data  string // data directory in a container

	program string   // of a local server
	tool    string   // a program that its package may lack; PATH counts only with it
	dirs    []string // patterns of directories that may have it, beside PATH
	apt     string   // its Debian packages
	brew    string   // its Homebrew formula
	module  string   // its module in testdata/servers, from which make builds it in bin

	url     string   // format of Server.URL, given host:port
	schemes []string // allowed in FENCELAB_*_ADDR; none: host:port only
	// accept checks and completes the URL from FENCELAB_*_ADDR, or (bare) from host:port. nil: any.
	accept func(u *url.URL, bare bool) bool

	linked bool // servers started together are a cluster, with placement.Peers
	// command is called before every start.
	command func(ctx context.Context, at placement) (command, error)
	// ready requests the version; an error means "not ready yet".
	ready func(ctx context.Context, addr, url string, local bool) (version string, err error)
	// leads reports whether the server is the leader. nil: there are no leaders.
	leads func(ctx context.Context, addr string) (bool, error)
	// clock reads the server's wall clock. nil: no Options.Clock.
	clock func(ctx context.Context, addr string) (time.Time, error)
	// deny makes the server answer writes with errors, or ends that. nil: it can't.
	deny func(ctx context.Context, addr string, isSo bool) error
	// embedded starts an imitation. nil: there is none.
	embedded func() (addr, version string, stop func() error, err error)
}

func (t *serverType) env(what string) string {
	return "FENCELAB_" + strings.ToUpper(t.name) + "_" + what
}

func (t *serverType) addrFormat() string {
	if t.schemes == nil {
		return "host:port"
	}
	return "host:port or a URL (" + strings.Join(t.schemes, "://, ") + "://)"
}

// parseAddr parses the user's address of a server. The error doesn't quote it: it may contain a password.
func (t *serverType) parseAddr(set string) (addr, at string, err error) {
	set = strings.TrimSpace(set)
	if t.schemes == nil {
		if _, _, err := net.SplitHostPort(set); err != nil || strings.Contains(set, "/") {
			return "", "", fmt.Errorf("%s must be %s", t.env("ADDR"), t.addrFormat())
		}
		return set, fmt.Sprintf(t.url, set), nil
	}
	bare := !strings.Contains(set, "://")
	if bare {
		set = fmt.Sprintf(t.url, set)
	}
	u, err := url.Parse(set)
	if err != nil || u.Host == "" || !slices.Contains(t.schemes, u.Scheme) || t.accept != nil && !t.accept(u, bare) {
		return "", "", fmt.Errorf("%s must be %s", t.env("ADDR"), t.addrFormat())
	}
	addr = u.Host
	if u.Port() == "" {
		port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
		addr = net.JoinHostPort(u.Hostname(), cmp.Or(port, strconv.Itoa(t.ports[0])))
	}
	return addr, u.String(), nil
}

// group is servers of one type that are started and removed together.
type group struct {
	*serverType
	names []string
	join  []*Server // running servers of the same provider, reached as placement.Joined
}

func numbered(prefix string, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("%s%d", prefix, i+1))
	}
	return names
}

func startSingle(ctx context.Context, t *serverType, o *Options) (*Server, error) {
	return startGroupOfOne(ctx, &group{serverType: t, names: []string{t.name}}, o)
}

type command struct {
	Path   string            // local only; default: placement.Path
	Args   []string          // argv including the program's name; in a container, the image's CMD
	Env    []string          // added to the inherited environment
	Files  map[string][]byte // by absolute path; written before the command runs
	mounts []string          // files on this machine, mounted in a container
}

type placement struct {
	Provider Provider
	Path     string   // local only: the program
	Dir      string   // data directory, kept across restarts unless wiped
	Listen   string   // the IP address to listen on
	Self     int      // its index in Peers
	Peers    []peer   // all servers of the group, in order
	Joined   []peer   // those in group.join, in order
	More     []string // the user's arguments
}

// peer is a server as its group sees it.
type peer struct {
	Name  string
	Host  string
	Ports []int // as in serverType.ports
}

func (at placement) me() peer { return at.Peers[at.Self] }

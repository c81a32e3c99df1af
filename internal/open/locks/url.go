package locks

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
)

// URLs lists [ParseURL]'s URLs.
const URLs = "redis://[USER:PASSWORD@]HOST:PORT[/DB], redlock://HOST:PORT,HOST:PORT,..., etcd://HOST:PORT,..., zookeeper://HOST:PORT,..., consul://HOST:PORT,\n" +
	"postgres://USER[:PASSWORD]@HOST:PORT/DB or s3://[ID:SECRET@]BUCKET[/PREFIX]?endpoint=URL&region=NAME; with TLS rediss, redlocks, etcds, consuls\n" +
	"or ?sslmode=verify-full"

// ErrScheme is wrapped by [ParseURL]'s error for a URL whose scheme is no lock's.
var ErrScheme = errors.New("locks: unknown URL scheme")

// Parse returns the lock of a URL, or of a name, at its default addresses.
func Parse(lock string) (Spec, error) {
	if addrs := Addrs(lock); addrs != nil {
		return Spec{Lock: lock, Addrs: slices.Clone(addrs)}, nil
	}
	spec, err := ParseURL(lock)
	if errors.Is(err, ErrScheme) {
		err = fmt.Errorf("want a URL, such as redis://HOST:PORT, or a name: %s (-h lists all URLs)", strings.Join(Names(), ", "))
	}
	return spec, err
}

// ParseURL returns the lock and servers of a URL, one of [URLs]. Errors don't quote it: it may hold a password.
func ParseURL(u string) (Spec, error) {
	name, rest, isURL := strings.Cut(u, "://")
	spec, prefix := Spec{}, ""
	for lock, o := range openers {
		if begin, ok := o.schemes[name]; ok {
			spec.Lock, prefix = lock, begin
		}
	}
	if spec.Lock == "" || !isURL {
		return Spec{}, fmt.Errorf("%w; use one of %s", ErrScheme, URLs)
	}
	if spec.Lock == Postgres || spec.Lock == Redis || spec.Lock == S3 {
		spec.Addrs = []string{u}
		return spec, nil
	}
	at := strings.LastIndex(rest, "@") + 1
	hosts, user, tail := rest[at:], rest[:at], ""
	if i := strings.IndexAny(hosts, "/?"); i >= 0 {
		hosts, tail = hosts[:i], hosts[i:]
	}
	if spec.Lock != Redlock && user+strings.Trim(tail, "/") != "" {
		return Spec{}, fmt.Errorf("locks: a URL of %s is %s://HOST:PORT alone, without a user, a path or parameters", spec.Lock, name)
	}
	for host := range strings.SplitSeq(hosts, ",") {
		if _, _, err := net.SplitHostPort(host); err != nil {
			return Spec{}, fmt.Errorf("locks: a URL of %s is %s://HOST:PORT, and %q is not HOST:PORT", spec.Lock, name, host)
		}
		spec.Addrs = append(spec.Addrs, strings.TrimRight(prefix+user+host+tail, "/"))
	}
	return spec, nil
}

// String names the lock and its servers, without passwords.
func (s Spec) String() string {
	var at []string
	for _, addr := range s.Addrs {
		if _, rest, found := strings.Cut(addr, "://"); found {
			addr = rest
		}
		addr, query, _ := strings.Cut(addr, "?")
		if strings.Contains(query, "@") || strings.Contains(addr, "password=") { // malformed, or PostgreSQL's other form
			addr = "the given address"
		}
		at = append(at, addr[strings.LastIndex(addr, "@")+1:])
	}
	return s.Lock + " at " + strings.Join(at, ", ")
}

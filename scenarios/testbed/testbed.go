// Package testbed starts the real servers that scenarios run against. None of them outlives the process: Close, a signal and
// the death of the process end them, and the next start on the machine removes what is left even so.
//
// A [Provider] is where servers come from. The environment chooses it, so that one test runs everywhere:
//
//	FENCELAB_TESTBED        the provider; "auto" if unset
//	FENCELAB_REDIS_IMAGE    containers: the Redis image
//	FENCELAB_REDIS_SERVER   local: the path of redis-server
//	FENCELAB_REDIS_ADDR     external: host:port, or a redis:// or rediss:// URL; of several servers, separated by commas
//
// The same goes for ETCD, ZOOKEEPER (path: zkServer.sh), CONSUL, POSTGRES (path: postgres, with initdb beside it; postgres://
// URLs), S3 (path: versitygw) and DYNAMODB (path: minidyn). URLs of the last two are http:// or https://, with the
// credentials, or else those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Provider says where a server comes from.
type Provider string

// The providers.
const (
	Auto       Provider = "auto"       // containers where a Docker engine answers, else local
	Containers Provider = "containers" // a Docker container of a pinned image
	Local      Provider = "local"      // a child process, from a binary on this machine
	External   Provider = "external"   // a server that the user runs
	Embedded   Provider = "embedded"   // an imitation inside this process
)

// Names of environment variables.
const (
	EnvProvider  = "FENCELAB_TESTBED"
	EnvRedisAddr = "FENCELAB_REDIS_ADDR"
	EnvStrict    = "FENCELAB_STRICT"  // set to 1, it forbids tests to skip a missing server or to use an imitation
	EnvStarted   = "FENCELAB_STARTED" // a file that gets a line for each server type that a process starts
)

// ParseProvider returns the provider named s, or an error that lists the names.
func ParseProvider(s string) (Provider, error) {
	var names []string
	for _, p := range []Provider{Auto, Containers, Local, External, Embedded} {
		if p == Provider(s) {
			return p, nil
		}
		names = append(names, string(p))
	}
	return "", fmt.Errorf("testbed: provider %q is none of %s", s, strings.Join(names, ", "))
}

// poll calls try until it returns nil or a [permanent] error, or until ctx ends. Each try ends within a second, so that one
// lost packet doesn't use up ctx.
func poll(ctx context.Context, try func(context.Context) error) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline, bounded := ctx.Deadline()
	var last error
	for {
		tryCtx, cancel := context.WithTimeout(ctx, time.Second)
		err := try(tryCtx)
		cancel()
		if _, ok := errors.AsType[permanent](err); ok || err == nil {
			return err
		}
		// An error that is only the end of ctx must not hide the one before.
		if cut := ctx.Err() != nil || bounded && !time.Now().Before(deadline); last == nil || !cut {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last try: %w", context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}

// permanent marks an error that no further try will cure.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Package testbed starts the real servers that scenarios run against, and makes sure that none of them outlives the
// process: not after Close, not after Ctrl-C, and after a SIGKILL only until the next start on the same machine.
//
// Where a server comes from is its [Provider]. The environment chooses, so that one test runs everywhere:
//
//	FENCELAB_TESTBED        the provider; "auto" if unset
//	FENCELAB_REDIS_IMAGE    containers: the Redis image
//	FENCELAB_REDIS_SERVER   local: the path of redis-server
//	FENCELAB_REDIS_ADDR     external: host:port, or a redis:// or rediss:// URL; of several servers, separated by commas
//
// and likewise FENCELAB_ETCD_IMAGE and so on for etcd, ZOOKEEPER, CONSUL, POSTGRES, S3 and DYNAMODB.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	Embedded   Provider = "embedded"   // an imitation inside this process, for demonstrations
)

// Names of the environment variables that choose servers.
const (
	EnvProvider    = "FENCELAB_TESTBED"
	EnvRedisImage  = "FENCELAB_REDIS_IMAGE"
	EnvRedisServer = "FENCELAB_REDIS_SERVER"
	EnvRedisAddr   = "FENCELAB_REDIS_ADDR"
	EnvEtcdImage   = "FENCELAB_ETCD_IMAGE"
	EnvEtcdServer  = "FENCELAB_ETCD_SERVER"
	EnvEtcdAddr    = "FENCELAB_ETCD_ADDR"
)

var providers = []Provider{Auto, Containers, Local, External, Embedded}

// ParseProvider returns the provider named s, or an error that lists the names.
func ParseProvider(s string) (Provider, error) {
	if p := Provider(s); slices.Contains(providers, p) {
		return p, nil
	}
	names := make([]string, len(providers))
	for i, p := range providers {
		names[i] = string(p)
	}
	return "", fmt.Errorf("testbed: provider %q is none of %s", s, strings.Join(names, ", "))
}

const pollInterval = 10 * time.Millisecond

// poll calls try until it returns nil or a [permanent] error, or until ctx ends. A try ends within a second, so that
// one that got no answer (a packet lost on a wrong route) doesn't use up ctx.
func poll(ctx context.Context, try func(context.Context) error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	deadline, bounded := ctx.Deadline()
	var last error // of the last try that the end of ctx did not cut
	for {
		tryCtx, cancel := context.WithTimeout(ctx, time.Second)
		err := try(tryCtx)
		cancel()
		if _, ok := errors.AsType[permanent](err); ok || err == nil {
			return err
		}
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

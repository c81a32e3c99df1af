// Package testbed starts the real servers that scenarios run against. A Start function returns once its servers answer. Unless
// its doc says otherwise, their data survive a kill, but not always a power failure. No server outlives the process: however it
// ends, a watchdog removes its servers and directories within seconds. To remove containers it needs the docker command.
//
// The environment chooses the [Provider] of servers:
//
//	FENCELAB_TESTBED        the provider; "auto" if unset
//	FENCELAB_REDIS_IMAGE    containers: the Redis image
//	FENCELAB_REDIS_SERVER   local: the path of redis-server
//	FENCELAB_REDIS_ADDR     external: host:port, or a redis:// or rediss:// URL; of several servers, separated by commas
//
// The same variables exist for ETCD, ZOOKEEPER (zkServer.sh), CONSUL, POSTGRES (postgres, beside initdb), S3 (versitygw) and
// DYNAMODB (minidyn). The last two have http:// or https:// URLs, with credentials or those of AWS_ACCESS_KEY_ID and
// AWS_SECRET_ACCESS_KEY.
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
	EnvStrict    = "FENCELAB_STRICT"  // 1: tests must not skip missing servers or use imitations
	EnvStarted   = "FENCELAB_STARTED" // a file that lists the server types that processes start
)

func parseProvider(s string) (Provider, error) {
	var names []string
	for _, p := range []Provider{Auto, Containers, Local, External, Embedded} {
		if p == Provider(s) {
			return p, nil
		}
		names = append(names, string(p))
	}
	return "", fmt.Errorf("testbed: provider %q is none of %s", s, strings.Join(names, ", "))
}

// poll retries try, for a second each in case a packet is lost, until it returns nil or a [permanent] error, or ctx ends.
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
		// A last try that is cut short must not hide the error before.
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

type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

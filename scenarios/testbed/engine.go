package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"
)

// Labels of containers, networks and volumes: the process that started it, so that a later process can tell whether they are
// orphans.
const (
	labelHost    = "dev.fencelab.host"
	labelOwner   = "dev.fencelab.owner"
	labelStarted = "dev.fencelab.started"
)

const (
	engineTimeout = 30 * time.Second // for an engine to answer, and to do what takes a busy one seconds
	pullTimeout   = 5 * time.Minute  // for an image to arrive
	createTimeout = time.Minute      // for a container to be created and started
)

// quiet silences testcontainers, whose diary would drown a test's output. What fails is in the errors that it returns.
var quiet = sync.OnceFunc(func() { tclog.SetDefault(tclog.NewNoopLogger()) })

// dialEngine connects to the Docker engine that testcontainers finds.
func dialEngine(ctx context.Context) (*testcontainers.DockerProvider, error) {
	quiet()
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	type result struct {
		engine *testcontainers.DockerProvider
		err    error
	}
	done := make(chan result, 1)
	go func() { // it takes no context
		// NewDockerProvider doesn't know the default network's name, and would make one and leave it behind.
		engine, err := testcontainers.ProviderDefault.GetProvider()
		if err != nil {
			done <- result{nil, err}
			return
		}
		done <- result{engine.(*testcontainers.DockerProvider), nil}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, fmt.Errorf("no Docker engine answers (%s): install or start Docker; docker version tells more",
				strings.ReplaceAll(r.err.Error(), "\n", "; "))
		}
		// testcontainers goes on to look elsewhere when the engine that was asked for doesn't answer.
		if want, got := os.Getenv("DOCKER_HOST"), r.engine.Client().DaemonHost(); want != "" && got != want {
			return nil, errors.Join(fmt.Errorf("the Docker engine at %s (DOCKER_HOST) doesn't answer: start it, or unset DOCKER_HOST", want),
				r.engine.Close())
		}
		return r.engine, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("no Docker engine answered within %v: %w", engineTimeout, context.Cause(ctx))
	}
}

// newName returns a name for something in the engine.
func newName() string { return dirPrefix + uuid.NewString() }

// labels name this process as the owner.
func labels() (map[string]string, error) {
	me, err := ownerOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	return map[string]string{labelHost: me.Host, labelOwner: strconv.Itoa(me.PID), labelStarted: me.Started}, nil
}

// swept is set once this process has swept.
var swept struct {
	sync.Mutex
	containers bool
}

// sweepContainers removes, once, what processes that were killed have left in the engine.
func sweepContainers(ctx context.Context, engine *testcontainers.DockerProvider) error {
	swept.Lock()
	defer swept.Unlock()
	if swept.containers {
		return nil
	}
	orphan := func(labels map[string]string) bool {
		pid, err := strconv.Atoi(labels[labelOwner])
		return err == nil && (owner{labels[labelHost], pid, labels[labelStarted]}).gone()
	}
	// Another process may be sweeping too.
	check := func(err error, what, id string) error {
		if err == nil || cerrdefs.IsNotFound(err) || cerrdefs.IsConflict(err) {
			return nil
		}
		return fmt.Errorf("remove what a killed process left: docker %s rm -f %s: %w", what, id, err)
	}
	docker := engine.Client()
	owned := make(client.Filters).Add("label", labelOwner)
	containers, err := docker.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: owned})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	for _, c := range containers.Items {
		if !orphan(c.Labels) {
			continue
		}
		_, err := docker.ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		if err := check(err, "container", c.ID); err != nil {
			return err
		}
	}
	networks, err := docker.NetworkList(ctx, client.NetworkListOptions{Filters: owned})
	if err != nil {
		return fmt.Errorf("list networks: %w", err)
	}
	for _, n := range networks.Items {
		if !orphan(n.Labels) {
			continue
		}
		_, err := docker.NetworkRemove(ctx, n.ID, client.NetworkRemoveOptions{})
		if err := check(err, "network", n.ID); err != nil {
			return err
		}
	}
	volumes, err := docker.VolumeList(ctx, client.VolumeListOptions{Filters: owned})
	if err != nil {
		return fmt.Errorf("list volumes: %w", err)
	}
	for _, v := range volumes.Items {
		if !orphan(v.Labels) {
			continue
		}
		_, err := docker.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{Force: true})
		if err := check(err, "volume", v.Name); err != nil {
			return err
		}
	}
	swept.containers = true
	return nil
}

package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"
)

// Labels of a container: the process that started it, so that a later process can tell whether it is an orphan.
const (
	labelHost    = "dev.fencelab.host"
	labelOwner   = "dev.fencelab.owner"
	labelStarted = "dev.fencelab.started"
)

const (
	engineTimeout = 10 * time.Second // for an engine to answer
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
	go func() { // NewDockerProvider takes no context
		engine, err := testcontainers.NewDockerProvider()
		done <- result{engine, err}
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

// runContainer runs image with cmd and publishes port. It returns once the container has started, which says nothing
// of the server in it.
func runContainer(
	ctx context.Context, engine *testcontainers.DockerProvider, image string, cmd []string, port string, progress io.Writer,
) (*testcontainers.DockerContainer, error) {
	if err := sweepContainers(ctx, engine); err != nil {
		return nil, err
	}
	me, err := ownerOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	host, err := engine.DaemonHost(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the Docker engine's host: %w", err)
	}
	if _, err := engine.Client().ImageInspect(ctx, image); cerrdefs.IsNotFound(err) {
		_, _ = fmt.Fprintf(progress, "testbed: pulling the image %s\n", image)
	}

	// A pull can be cut short. The creation can't, or a container might come to be whose id nobody learns.
	pullCtx, stopPull := context.WithTimeout(ctx, pullTimeout)
	defer stopPull()
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	pullOver := context.AfterFunc(pullCtx, func() { cancel(context.Cause(pullCtx)) })
	defer pullOver()
	create := func(context.Context, testcontainers.ContainerRequest) error {
		if !pullOver() {
			return context.Cause(pullCtx)
		}
		time.AfterFunc(createTimeout, func() { cancel(context.DeadlineExceeded) })
		return nil
	}

	c, err := testcontainers.Run(runCtx, image,
		testcontainers.WithCmd(cmd...),
		testcontainers.WithExposedPorts(port),
		testcontainers.WithLabels(map[string]string{
			labelHost: me.Host, labelOwner: strconv.Itoa(me.PID), labelStarted: me.Started,
		}),
		testcontainers.WithHostConfigModifier(func(hc *container.HostConfig) {
			if host == "localhost" { // else the engine is elsewhere, and its loopback interface out of reach
				hc.PortBindings = network.PortMap{network.MustParsePort(port): {{HostIP: netip.MustParseAddr("127.0.0.1")}}}
			}
		}),
		testcontainers.WithAdditionalLifecycleHooks(testcontainers.ContainerLifecycleHooks{
			PreCreates: []testcontainers.ContainerRequestHook{create},
		}),
	)
	if err != nil {
		err = fmt.Errorf("run the image %s: %w", image, err)
		if cause := context.Cause(runCtx); cause != nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return nil, errors.Join(err, removeContainer(c))
	}
	return c, nil
}

// removeContainer kills and removes c, and may be called again.
func removeContainer(c *testcontainers.DockerContainer) error {
	if c == nil {
		return nil
	}
	if err := testcontainers.TerminateContainer(c, testcontainers.StopTimeout(0)); err != nil {
		return fmt.Errorf("testbed: remove it by hand: docker rm -f %s: %w", c.GetContainerID(), err)
	}
	return nil
}

// containerAddrs returns the addresses at which a container's port may be reached. There are two, because
// testcontainers takes its own container's gateway for the engine's host wherever it runs in a container,
// which is wrong where the engine runs in that container too.
func containerAddrs(ctx context.Context, c *testcontainers.DockerContainer, port string) ([]string, error) {
	host, err := c.Host(ctx)
	if err != nil {
		return nil, err
	}
	mapped, err := c.MappedPort(ctx, port)
	if err != nil {
		return nil, err
	}
	addrs := []string{net.JoinHostPort(host, mapped.Port())}
	if host != "localhost" {
		addrs = append(addrs, net.JoinHostPort("127.0.0.1", mapped.Port()))
	}
	return addrs, nil
}

// stillRuns returns a [permanent] error with the end of the container's log if it has exited.
func stillRuns(ctx context.Context, c *testcontainers.DockerContainer) error {
	state, err := c.State(ctx)
	if err != nil || state.Running {
		return err
	}
	err = fmt.Errorf("container exited with status %d", state.ExitCode)
	if logs, logErr := c.Logs(ctx); logErr == nil {
		b, _ := io.ReadAll(logs)
		_ = logs.Close()
		err = fmt.Errorf("%w: %s", err, tail(b))
	}
	return permanent{err}
}

// swept is set once this process has swept.
var swept struct {
	sync.Mutex
	containers bool
}

// sweepContainers removes, once, the containers of processes that were killed.
func sweepContainers(ctx context.Context, engine *testcontainers.DockerProvider) error {
	swept.Lock()
	defer swept.Unlock()
	if swept.containers {
		return nil
	}
	list, err := engine.Client().ContainerList(ctx, client.ContainerListOptions{
		All: true, Filters: make(client.Filters).Add("label", labelOwner),
	})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	for _, c := range list.Items {
		pid, err := strconv.Atoi(c.Labels[labelOwner])
		if err != nil || !(owner{c.Labels[labelHost], pid, c.Labels[labelStarted]}).gone() {
			continue
		}
		_, err = engine.Client().ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		// Another process may be sweeping too.
		if err != nil && !cerrdefs.IsNotFound(err) && !cerrdefs.IsConflict(err) {
			return fmt.Errorf("remove what process %d left: docker rm -f %s: %w", pid, c.ID, err)
		}
	}
	swept.containers = true
	return nil
}

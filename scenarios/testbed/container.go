package testbed

import (
	"bytes"
	"cmp"
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
	"github.com/google/uuid"
	dockercontainer "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/proc"
)

const (
	engineTimeout = 30 * time.Second // for an engine to answer
	pullTimeout   = 5 * time.Minute
	changeTimeout = 2 * time.Minute // to create, start or remove; a busy engine takes seconds
)

type containers struct {
	group   *group
	engine  *testcontainers.DockerProvider
	docker  client.APIClient
	host    string // where clients reach published ports
	network string // id; empty: none
	all     []*container
}

// container is the host of one server. Its data is in a volume, which one of [container.runOnce] fills.
type container struct {
	*containers
	name     string
	hostPort int
	release  func() error // of hostPort
	volume   string
	networks map[string]string // id of a network to the server's name there
	made     *testcontainers.DockerContainer
	progress io.Writer
}

var silence = sync.OnceFunc(func() { tclog.SetDefault(tclog.NewNoopLogger()) })

func dialEngine(ctx context.Context) (*testcontainers.DockerProvider, error) {
	silence()
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	var provider testcontainers.GenericProvider
	var err error
	done := make(chan struct{})
	go func() { // it takes no context
		defer close(done)
		// NewDockerProvider would leave a default network behind.
		provider, err = testcontainers.ProviderDefault.GetProvider()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		return nil, fmt.Errorf("no Docker engine answered within %v: %w", engineTimeout, context.Cause(ctx))
	}
	if err != nil {
		return nil, fmt.Errorf("no Docker engine answers (%s): install or start Docker; run docker version for details",
			strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	engine := provider.(*testcontainers.DockerProvider)
	// testcontainers tries other engines, too.
	if want := os.Getenv("DOCKER_HOST"); want != "" && engine.Client().DaemonHost() != want {
		return nil, errors.Join(fmt.Errorf("the Docker engine at %s (DOCKER_HOST) doesn't answer: start it, or unset DOCKER_HOST", want),
			engine.Close())
	}
	return engine, nil
}

func newName() string { return dirPrefix + uuid.NewString() }

func newContainers(ctx context.Context, g *group, o *Options) (all []host, removeShared func() error, err error) {
	engine, err := dialEngine(ctx)
	if err != nil {
		return nil, nil, g.missing(err)
	}
	c := &containers{group: g, engine: engine, docker: engine.Client()}
	defer func() {
		if err != nil {
			for _, one := range c.all {
				err = errors.Join(err, one.remove(ctx))
			}
			err = errors.Join(err, c.remove()) //nolint:contextcheck // whatever has become of ctx
		}
	}()
	if c.host, err = publishedAt(ctx, engine); err != nil {
		return nil, nil, err
	}
	if err := watch(c.docker.DaemonHost()); err != nil {
		return nil, nil, err
	}
	for _, name := range g.names {
		port, release, err := proc.ReservePort()
		if err != nil {
			return nil, nil, err
		}
		one := &container{
			containers: c, name: name, hostPort: port, release: release, volume: newName(),
			networks: make(map[string]string), progress: o.Progress,
		}
		c.all, all = append(c.all, one), append(all, one)
	}
	if g.linked && len(g.names) > 1 || len(g.join) > 0 {
		err = c.link(ctx)
	}
	return all, c.remove, err
}

// publishedAt returns the host of published ports. In a container with the engine's socket, testcontainers guesses a gateway,
// which is wrong if the engine runs in the same container; the engine then has this host's name.
func publishedAt(ctx context.Context, engine *testcontainers.DockerProvider) (string, error) {
	host, err := engine.DaemonHost(ctx)
	if err != nil {
		return "", fmt.Errorf("find the Docker engine's host: %w", err)
	}
	if host == "localhost" {
		return loopback, nil
	}
	if os.Getenv("TESTCONTAINERS_HOST_OVERRIDE") != "" || !strings.HasPrefix(engine.Client().DaemonHost(), "unix://") {
		return host, nil // not a guess, and another machine may have the same name
	}
	info, err := engine.Client().Info(ctx, client.InfoOptions{})
	if err != nil {
		return "", fmt.Errorf("get the host name of the Docker engine: %w", err)
	}
	if name, err := os.Hostname(); err == nil && info.Info.Name == name {
		return loopback, nil
	}
	return host, nil
}

// link creates a network on which servers reach each other by name. Clients use another one.
func (c *containers) link(ctx context.Context) error {
	// Uninterrupted, or the id might be lost.
	createCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	made, err := c.docker.NetworkCreate(createCtx, newName(), client.NetworkCreateOptions{
		Driver: "bridge", Internal: true, Labels: map[string]string{labelOwner: owner},
	})
	if err != nil {
		return fmt.Errorf("make a network: %w", err)
	}
	c.network = made.ID
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, one := range c.all {
		one.networks[c.network] = one.name
	}
	for _, s := range c.group.join {
		err := s.change(ctx, "connect", func(ctx context.Context) error {
			return s.host.(*container).connect(ctx, c.network, s.Name)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// remove must be called after the group's containers are removed.
func (c *containers) remove() error {
	defer func() { _ = c.engine.Close() }()
	if c.network == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), changeTimeout)
	defer cancel()
	for _, s := range c.group.join {
		s.mu.Lock()
		err := s.host.(*container).disconnect(ctx, c.network)
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
	_, err := c.docker.NetworkRemove(ctx, c.network, client.NetworkRemoveOptions{})
	return removeError(err, "network rm", c.network)
}

func removeError(err error, command, id string) error {
	if err == nil || cerrdefs.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("testbed: remove it by hand: docker %s %s: %w", command, id, err)
}

func (c *container) placement() placement {
	return placement{Provider: Containers, Dir: c.group.data, Listen: "0.0.0.0"}
}

func (c *container) peer(name string) peer { return peer{Name: name, Host: name, Ports: c.group.ports} }

func (c *container) connect(ctx context.Context, id, name string) error {
	c.networks[id] = name
	if c.made == nil {
		return nil
	}
	_, err := c.docker.NetworkConnect(ctx, id, client.NetworkConnectOptions{
		Container: c.made.GetContainerID(), EndpointConfig: &network.EndpointSettings{Aliases: []string{name}},
	})
	if err != nil {
		return fmt.Errorf("connect %s to the network of its peers: %w", c.name, err)
	}
	return nil
}

func (c *container) disconnect(ctx context.Context, id string) error {
	if c.made != nil {
		_, err := c.docker.NetworkDisconnect(ctx, id, client.NetworkDisconnectOptions{Container: c.made.GetContainerID(), Force: true})
		if err != nil && !cerrdefs.IsNotFound(err) {
			return fmt.Errorf("disconnect %s from the network of its peers: %w", c.name, err)
		}
	}
	delete(c.networks, id)
	return nil
}

func (c *container) start(ctx context.Context, cmd command) error {
	if c.made != nil {
		_, err := c.docker.ContainerStart(ctx, c.made.GetContainerID(), client.ContainerStartOptions{})
		if err != nil {
			return fmt.Errorf("start the container: %w", err)
		}
		return nil
	}
	image := cmp.Or(os.Getenv(c.group.env("IMAGE")), c.group.image)
	if err := c.pull(ctx, image); err != nil {
		return err
	}
	if err := c.run(ctx, image, cmd); err != nil {
		return errors.Join(fmt.Errorf("run the image %s: %w", image, err), c.removeContainer(ctx))
	}
	return nil
}

func (c *container) pull(ctx context.Context, image string) error {
	if _, err := c.docker.ImageInspect(ctx, image); !cerrdefs.IsNotFound(err) {
		return err
	}
	const get = `sudo env PATH="$PATH" make images`
	missing := func(err error) error { return &MissingError{c.group.title + " image", get, err} }
	if strings.HasPrefix(image, "fencelab/") { // never from a registry: the name there is not ours
		return missing(fmt.Errorf("the engine lacks the image %s: %s", image, get))
	}
	_, _ = fmt.Fprintf(c.progress, "testbed: pulling the image %s\n", image)
	pullCtx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	err := c.engine.PullImage(pullCtx, image)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if _, inspectErr := c.docker.ImageInspect(ctx, image); !cerrdefs.IsNotFound(inspectErr) {
		return inspectErr
	}
	return missing(fmt.Errorf("cannot pull the image %s: %w\n    where no registry is reachable: %s (make test and make demo then use "+
		"what it built), or set %s to an image you have and TESTCONTAINERS_RYUK_DISABLED=true", image, err, get, c.group.env("IMAGE")))
}

// run creates a container, uninterrupted, publishes the clients' port, and returns before the server is ready.
func (c *container) run(ctx context.Context, image string, cmd command) error {
	labels := map[string]string{labelOwner: owner}
	port := fmt.Sprintf("%d/tcp", c.group.ports[0])
	binding := network.PortBinding{HostPort: strconv.Itoa(c.hostPort)}
	if c.host == loopback { // where the port is reserved; a remote engine's would be out of reach
		binding.HostIP = netip.MustParseAddr(loopback)
	}
	env := make(map[string]string)
	for _, e := range cmd.Env {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	var files []testcontainers.ContainerFile
	for path, data := range cmd.Files {
		files = append(files, testcontainers.ContainerFile{Reader: bytes.NewReader(data), ContainerFilePath: path, FileMode: 0o600})
	}
	connect := func(ctx context.Context, made testcontainers.Container) error {
		c.made = made.(*testcontainers.DockerContainer)
		for id, name := range c.networks {
			if err := c.connect(ctx, id, name); err != nil {
				return err
			}
		}
		return nil
	}
	runCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	made, err := testcontainers.Run(runCtx, image,
		testcontainers.WithCmd(cmd.Args...),
		testcontainers.WithEnv(env),
		testcontainers.WithFiles(files...),
		testcontainers.WithExposedPorts(port),
		testcontainers.WithLabels(labels),
		testcontainers.WithHostConfigModifier(func(hc *dockercontainer.HostConfig) {
			hc.PortBindings = network.PortMap{network.MustParsePort(port): {binding}}
			hc.Mounts = append(hc.Mounts, mount.Mount{
				Type: mount.TypeVolume, Source: c.volume, Target: c.group.data,
				VolumeOptions: &mount.VolumeOptions{Labels: labels},
			})
			for _, file := range cmd.mounts {
				hc.Mounts = append(hc.Mounts, mount.Mount{Type: mount.TypeBind, Source: file, Target: file, ReadOnly: true})
			}
		}),
		testcontainers.WithAdditionalLifecycleHooks(testcontainers.ContainerLifecycleHooks{
			PostCreates: []testcontainers.ContainerHook{connect},
		}),
	)
	if made != nil {
		c.made = made
	}
	return err
}

func (c *container) runOnce(ctx context.Context, cmd command) error {
	if err := c.start(ctx, cmd); err != nil {
		return err
	}
	wait := c.docker.ContainerWait(ctx, c.made.GetContainerID(), client.ContainerWaitOptions{})
	select {
	case r := <-wait.Result:
		if r.StatusCode != 0 {
			return c.exitError(ctx)
		}
	case err := <-wait.Error:
		return fmt.Errorf("wait for the container's end: %w", err)
	}
	return c.removeContainer(ctx)
}

func (c *container) kill(ctx context.Context) error {
	if c.made == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	id := c.made.GetContainerID()
	wait := c.docker.ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: dockercontainer.WaitConditionNotRunning})
	_, err := c.docker.ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIGKILL"})
	if err != nil && !cerrdefs.IsConflict(err) && !cerrdefs.IsNotFound(err) { // it isn't running
		return fmt.Errorf("kill the container: %w", err)
	}
	select {
	case err := <-wait.Error:
		if !cerrdefs.IsNotFound(err) {
			return fmt.Errorf("wait for the container's end: %w", err)
		}
	case <-wait.Result:
	}
	return nil
}

func (c *container) pause(ctx context.Context) (faults.Heal, error) {
	id := c.made.GetContainerID()
	resume := func(ctx context.Context) error {
		_, err := c.docker.ContainerUnpause(ctx, id, client.ContainerUnpauseOptions{})
		return err
	}
	if _, err := c.docker.ContainerPause(ctx, id, client.ContainerPauseOptions{}); err != nil {
		if ctx.Err() != nil { // it may be paused all the same
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
			defer cancel()
			_ = resume(ctx)
		}
		return nil, err
	}
	return resume, nil
}

func (c *container) wipe(ctx context.Context) error {
	if err := c.removeContainer(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	_, err := c.docker.VolumeRemove(ctx, c.volume, client.VolumeRemoveOptions{Force: true})
	return removeError(err, "volume rm", c.volume)
}

func (c *container) remove(ctx context.Context) error { return errors.Join(c.wipe(ctx), c.release()) }

func (c *container) removeContainer(ctx context.Context) error {
	if c.made == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	id := c.made.GetContainerID()
	_, err := c.docker.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if err := removeError(err, "rm -f", id); err != nil {
		return err
	}
	c.made = nil
	return nil
}

func (c *container) addr() string { return net.JoinHostPort(c.host, strconv.Itoa(c.hostPort)) }

func (c *container) exitError(ctx context.Context) error {
	state, err := c.made.State(ctx)
	if err != nil || state.Running {
		return err
	}
	logs, err := c.made.Logs(ctx)
	if err != nil { // on a busy machine; the next poll may get it
		return fmt.Errorf("container exited with status %d: its log: %w", state.ExitCode, err)
	}
	text, err := io.ReadAll(logs)
	if err = errors.Join(err, logs.Close()); err != nil {
		return fmt.Errorf("container exited with status %d: its log: %w", state.ExitCode, err)
	}
	return permanent{fmt.Errorf("container exited with status %d: %s", state.ExitCode, tail(text))}
}

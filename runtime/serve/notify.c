/* Messages to the service manager that started the server. */
#include "runtime/serve/notify.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void mm_notify(const char *lines) {
  const char *path = getenv("NOTIFY_SOCKET");
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  const size_t n = path ? strlen(path) : 0;
  if (n < 2 || n >= sizeof to.sun_path || (*path != '/' && *path != '@')) return;
  memcpy(to.sun_path, path, n);
  if (*path == '@') to.sun_path[0] = 0; /* an abstract address */
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  (void)!sendto(fd, lines, strlen(lines), MSG_NOSIGNAL | MSG_DONTWAIT, (const struct sockaddr *)&to,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n));
  close(fd);
}
